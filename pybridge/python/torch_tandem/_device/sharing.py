"""Memory that tensors share with NumPy or with other processes. It is on the host, so tensors move there."""

import torch

from torch_tandem import _core
from torch_tandem._report import notes

_share_memory = torch.Tensor.share_memory_


def _references(tensor: torch.Tensor) -> int:
    """Number of references to a tensor's storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def has_aliases(tensor: torch.Tensor) -> bool:
    """Whether other tensors share a tensor's storage, not counting the base of a view.

    Such tensors would not see writes after the tensor has moved. Sparse tensors have no storage, and count as
    shared.
    """
    if tensor.layout != torch.strided:
        return True
    base = tensor._base if tensor._is_view() else None
    if base is not None and base.nbytes != base.untyped_storage().nbytes():
        return True
    return _references(tensor) > _references(torch.empty(1, device="tandem")) + (base is not None)


def move_to_host(tensor: torch.Tensor) -> None:
    """Move a tensor to the host, together with its base if it is a view."""
    if tensor.layout != torch.strided:
        torch.utils.swap_tensors(tensor, tensor.cpu())
        return
    base = tensor._base if tensor._is_view() else None
    with torch.no_grad():
        if base is None:
            tensor.data = tensor.detach().cpu()
        else:
            where = tensor.size(), tensor.stride(), tensor.storage_offset()
            move_to_host(base)
            tensor.data = base.detach().as_strided(*where)


def share_memory_(self: torch.Tensor) -> torch.Tensor:
    """`Tensor.share_memory_`, which first moves a tandem tensor to the host, where processes share memory."""
    if self.device.type == "tandem":
        if has_aliases(self):
            raise RuntimeError(
                "share_memory_(): other tensors are views of this tensor's memory, and Tandem cannot move "
                "them to the host. Share it before views of it are made, or share model.cpu()"
            )
        move_to_host(self)
        notes.add("tensors that share_memory_() shares with other processes were moved to the host")
    return _share_memory(self)


def share_memory_unless_on_gpu(self: torch.Tensor) -> torch.Tensor:
    """`Tensor.share_memory_` for programs that place tensors themselves. On a GPU it raises an error."""
    if self.device.type == "tandem" and _core.open_devices()[0] != "cpu":
        raise RuntimeError(
            "share_memory_(): processes cannot share a tandem tensor, they would get copies. Share it on the "
            "host instead: model.cpu().share_memory()"
        )
    return share_memory_(self)

"""PyTorch's C functions that a call may run.

A replay repeats operators and compares tensors, arguments, and the settings of `settings.py`. A C function of
PyTorch is known if it is an operator, if it reads or changes such a setting, or if it is listed here. What is
listed depends on nothing else, or changes only what is as before once the call has ended.
"""

import functools

import torch

from torch_tandem._functions import kinds

# fmt: off
# Modules whose functions are operators, by names of ATen.
_OPERATORS = frozenset(
    {"torch", "torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special", "torch._C._sparse",
     "torch._C._nested"}
)
_FUNCTIONS = {
    "torch": frozenset(
        [
            "asarray", "autocast_decrement_nesting", "autocast_increment_nesting", "can_cast",
            "clear_autocast_cache", "from_numpy", "frombuffer", "parse_schema", "promote_types",
        ]
    ),
    "torch._C": frozenset(
        [
            # The stacks of modes; `settings.py` compares their lengths if the code changes them.
            "_disabled_torch_dispatch_impl", "_disabled_torch_function_impl", "_get_dispatch_mode",
            "_get_dispatch_stack_at", "_get_function_stack_at", "_has_torch_function",
            "_has_torch_function_unary", "_has_torch_function_variadic", "_is_torch_function_all_disabled",
            "_len_torch_dispatch_stack", "_len_torch_function_stack", "_peek_should_skip_torch_function",
            "_pop_torch_dispatch_stack", "_pop_torch_function_stack", "_push_on_torch_dispatch_stack",
            "_push_on_torch_function_stack",
            # The table of operators.
            "_dispatch_find_schema_or_throw", "_dispatch_has_computed_kernel_for_dispatch_key",
            "_dispatch_has_kernel", "_dispatch_has_kernel_for_any_dispatch_key",
            "_dispatch_has_kernel_for_dispatch_key", "_dispatch_is_included_in_alias",
            "_dispatch_key_name", "_dispatch_key_parse", "_get_operation_overload", "_get_schema",
            "_is_view_op", "_jit_get_operation", "_jit_get_schemas_for_operator", "_parse_dispatch_key",
            "get", "has", "has_default_value",
            # Backward passes, whose threads have the call's objects.
            "_any_output_is_alias_to_input_or_output", "_any_requires_grad", "_current_graph_task_id",
            "_get_graph_exec_group", "_is_key_in_tls", "_get_obj_in_tls", "_remove_obj_from_tls",
            "_stash_obj_in_tls",
            # The device, which stays the same.
            "_accelerator_getAccelerator", "_accelerator_getDeviceIndex", "_accelerator_getStream",
            "_accelerator_synchronizeDevice", "_cuda_getDeviceCount", "_cuda_isInBadFork",
            "_cuda_isCurrentStreamCapturing",
            "_get_accelerator", "_get_privateuse1_backend_name", "_is_autocast_available",
            "_mps_is_in_bad_fork", "_mtia_isBuilt", "_mtia_isInBadFork",
            "_get_fp32_precision_getter", "_set_fp32_precision_setter",
            # Tensors and objects that are compared.
            "_group_tensors_by_device_and_dtype", "_log_api_usage_once", "_swap_tensor_impl",
            "from_raw_repr", "_is_opaque_type_registered", "_jit_is_script_object",
            # A transform or tracer, under which nothing is replayed.
            "_are_functorch_transforms_active", "_enter_dual_level", "_exit_dual_level",
            "_get_tracing_state", "_is_fake_tensor", "_is_tracing",
            # Guards, such as that of inference mode.
            "__enter__", "__exit__",
        ]
    ),
    "torch._C._autograd": frozenset(
        [
            "_get_creation_meta", "_make_saved_tensor", "_pop_saved_tensors_default_hooks",
            "_push_saved_tensors_default_hooks", "_saved_tensors_hooks_disable",
            "_saved_tensors_hooks_enable", "_saved_tensors_hooks_get_disabled_error_message",
            "_saved_tensors_hooks_is_enabled", "_top_saved_tensors_default_hooks", "unpack",
        ]
    ),
    "torch._C._functorch": frozenset(
        [
            "_add_batch_dim", "_func_decrement_nesting", "_func_increment_nesting", "_grad_decrement_nesting",
            "_grad_increment_nesting", "_jvp_decrement_nesting", "_jvp_increment_nesting",
            "_propagate_functional_input_mutation", "_remove_batch_dim", "_unwrap_batched",
            "_unwrap_for_grad", "_unwrap_functional_tensor", "_vmap_decrement_nesting",
            "_vmap_increment_nesting", "_wrap_for_grad", "_wrap_functional_tensor", "current_level",
            "get_inplace_requires_grad_allowed",
            "get_single_level_autograd_function_allowed", "get_unwrapped", "is_batchedtensor",
            "is_dead_tensor_wrapper", "is_functorch_wrapped_tensor", "is_gradtrackingtensor",
            "maybe_current_level", "maybe_get_bdim", "maybe_get_level", "peek_interpreter_stack",
            "pop_dynamic_layer_stack", "push_dynamic_layer_stack", "set_inplace_requires_grad_allowed",
            "set_single_level_autograd_function_allowed", "unwrap_dead_wrappers", "unwrap_if_dead",
        ]
    ),
    "torch._C._dynamo.autograd_compiler": frozenset({"set_autograd_compiler"}),
    "torch._C._dynamo.eval_frame": frozenset({"set_eval_frame"}),
    "torch._C._dynamo.guards": frozenset({"set_is_in_mode_without_ignore_compile_internals"}),
    "torch._C._nn": frozenset({"_parse_to"}),
}
# Methods of tensors that are no operators by their names.
_METHODS_OF_TENSORS = frozenset(
    [
        "_make_subclass", "_make_wrapper_subclass", "__array__", "as_subclass", "bfloat16", "bool", "byte",
        "cdouble", "cfloat", "char", "double", "float", "half", "int", "long", "ndimension", "nelement",
        "new", "new_tensor", "numpy", "short", "tolist", "type",
        # Comparisons, arithmetic and items, called by name.
        *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__"),
        *("__imul__", "__div__", "__rdiv__", "__idiv__", "__truediv__", "__rtruediv__", "__itruediv__"),
        *("__floordiv__", "__rfloordiv__", "__ifloordiv__", "__mod__", "__rmod__", "__imod__", "__pow__"),
        *("__rpow__", "__ipow__", "__matmul__", "__rmatmul__", "__neg__", "__pos__"),
        *("__abs__", "__invert__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__"),
        *("__rand__", "__or__", "__ror__", "__xor__", "__rxor__", "__lshift__", "__rlshift__"),
        *("__rshift__", "__rrshift__", "__ilshift__", "__irshift__", "__iand__", "__ior__", "__ixor__"),
        *("__getitem__", "__setitem__", "__bool__", "__nonzero__", "__int__", "__index__", "__float__"),
        *("__long__", "__complex__", "__len__", "__contains__"),
    ]
)
# Methods of PyTorch's other C types. `None` stands for all methods of a type.
_METHODS = {
    "Size": None, "dtype": None, "device": None, "layout": None, "memory_format": None, "finfo": None,
    "iinfo": None, "DispatchKey": None, "DispatchKeySet": None, "FunctionSchema": None, "Argument": None,
    "DisableTorchFunction": None, "DisableTorchFunctionSubclass": None, "_DisableTorchDispatch": None,
    "_DisableFuncTorch": None, "_EnableTorchFunction": None, "_DisableAutocast": None,
    "_AutoDispatchBelowAutograd": None, "_RestorePythonTLSSnapshot": None, "_InferenceMode": None,
    "_SetExcludeDispatchKeyGuard": None, "_IncludeDispatchKeyGuard": None,
    "_ExcludeDispatchKeyGuard": None, "_ForceDispatchKeyGuard": None,
    "Stream": frozenset(
        {"is_capturing", "record_event", "synchronize", "wait_event", "wait_stream"}
    ),
    "StorageBase": frozenset({"nbytes"}),
    "_EngineBase": frozenset({"is_checkpoint_valid", "run_backward"}),
    "_FunctionBase": frozenset(
        {"_register_hook", "_register_hook_dict", "apply", "maybe_clear_saved_tensors", "name",
         "register_hook", "register_prehook"}
    ),
    "Function": frozenset({"apply"}),
}  # fmt: skip
# Types whose objects have no state of their own, or one that only observed C functions read.
_COMPARABLE = frozenset(
    {"Generator", "Stream", "Event", "DispatchKeySet", "FunctionSchema", "Argument", "OpOverload",
     "StorageBase", "Store", "Backend", "Work", "Logger", "Reducer"}
)
_COMPARABLE_PREFIXES = ("ProcessGroup", "TCPStore", "FileStore", "HashStore", "PrefixStore")
# fmt: on
_CHECKS = frozenset({"__instancecheck__", "__subclasscheck__"})


@functools.cache
def is_operator(name: str) -> bool:
    """Whether ATen has an operator `name` that takes or returns tensors."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any("Tensor" in str(value.type) for s in schemas for value in (*s.arguments, *s.returns))


def is_known_function(module: str, name: str) -> bool:
    """Whether a function of one of PyTorch's modules is an operator or in the table."""
    if module.startswith("torch._ops.") or module == "torch_tandem._core":
        return True
    if module in _OPERATORS and is_operator(name):
        return True
    return name in _FUNCTIONS.get(module, ())


def is_known_of_tensor(name: str) -> bool:
    """Whether a method of tensors is an operator or in the table."""
    return is_operator(name) or name in _METHODS_OF_TENSORS


def is_comparable_type(kind: type) -> bool:
    """Whether objects of a C type have no state that a program changes, or one that is compared elsewhere."""
    if kinds.package_of(kind) != "torch":
        return False
    is_enumeration = hasattr(kind, "__members__")
    return is_enumeration or kind.__name__ in _COMPARABLE or kind.__name__.startswith(_COMPARABLE_PREFIXES)


def is_known_method(kind: type, name: str) -> bool:
    """Whether a method of one of PyTorch's C types is in the table."""
    known = _METHODS.get(kind.__name__, frozenset())
    return known is None or name in known or name in _CHECKS

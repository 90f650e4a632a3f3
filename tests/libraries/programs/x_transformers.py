"""Trains decoders, an encoder-decoder and encoders with current attention features, and generates."""

# /// script
# dependencies = ["x-transformers==2.31.10"]
# ///

import torch
from torch.nn import functional as F
from x_transformers import (
    AutoregressiveWrapper,
    ContinuousTransformerWrapper,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


def train(name, model, loss_of, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step % 10 == 9:
            print(name, step, loss.item())


def counting(count, length):
    start, stride = torch.randint(0, 20, (count, 1)), torch.randint(1, 4, (count, 1))
    return (start + stride * torch.arange(length)) % 20


decoder = TransformerWrapper(
    num_tokens=20,
    max_seq_len=32,
    attn_layers=Decoder(
        dim=32,
        depth=2,
        heads=4,
        attn_dim_head=8,
        attn_kv_heads=2,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        attn_qk_norm=True,
        attn_dropout=0.1,
        ff_dropout=0.1,
    ),
)
language = AutoregressiveWrapper(decoder)
train("decoder", language, lambda: language(counting(16, 25)), 60)

seq2seq = XTransformer(
    dim=32,
    tie_token_emb=True,
    enc_num_tokens=20,
    enc_depth=1,
    enc_heads=2,
    enc_max_seq_len=16,
    dec_num_tokens=20,
    dec_depth=1,
    dec_heads=2,
    dec_max_seq_len=16,
    enc_attn_dim_head=16,
    dec_attn_dim_head=16,
)


def reverse_loss():
    source = torch.randint(1, 20, (16, 8))
    target = torch.cat([torch.zeros(16, 1, dtype=torch.long), source.flip(1)], 1)
    mask = torch.ones_like(source).bool()
    return seq2seq(source, target, mask=mask)


train("reverse", seq2seq, reverse_loss, 40)

alibi = ContinuousTransformerWrapper(
    dim_in=3, dim_out=1, max_seq_len=20, attn_layers=Encoder(dim=32, depth=1, heads=4, alibi_pos_bias=True)
)


def moving_average_loss():
    x = torch.randn(8, 20, 3)
    mask = torch.arange(20) < torch.randint(10, 21, (8, 1))
    target = x[..., 0].cumsum(1) / torch.arange(1, 21)
    return F.mse_loss(alibi(x, mask=mask).squeeze(-1)[mask], target[mask])


train("alibi", alibi, moving_average_loss, 30)

vision = ViTransformerWrapper(
    image_size=16,
    patch_size=4,
    num_classes=2,
    attn_layers=Encoder(dim=32, depth=1, heads=2, attn_gate_values=True),
)
train("vision", vision, lambda: F.cross_entropy(vision(torch.randn(8, 3, 16, 16)), torch.arange(8) % 2), 20)

prompt = counting(4, 6)
for cached in (True, False):
    print("greedy", language.generate(prompt, 12, temperature=0.0, cache_kv=cached).tolist())
print(
    "sampled", language.generate(prompt, 8, temperature=1.0, filter_kwargs={"frac_num_tokens": 0.2}).tolist()
)
print("beam", language.beam_search(prompt, 6, beams=3).tolist())
print("reversed", seq2seq.generate(torch.arange(1, 9)[None], torch.zeros(1, 1, dtype=torch.long), 8).tolist())

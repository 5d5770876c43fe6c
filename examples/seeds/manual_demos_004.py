"""Seed 004: an MLP and a self-attention divided over ranks, from collectives on plain tensors, beside one card.

    onecard run --nproc_per_node 2 examples/seeds/manual_demos_004.py
    python examples/seeds/manual_demos_004.py --nproc 8      # starts its ranks itself, as the seed does

Forward as the seed has it, and one training step with gradients: `differentiable` has the collectives that autograd goes
through. The seed asks for an error below 0.1 %; here it is below 1e-5. Each rank keeps its part of the weights in a file.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import save_file
from torch import Tensor

import onecard as oc
from onecard.fleet.layers.mappings import copy_to, reduce_from


def mlp_on_one_process(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The MLP of the seed."""
    out1 = torch.matmul(x, w1)
    out2 = torch.matmul(out1, w2)
    return out2


def mlp_by_model_parallel(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """w1 by columns, w2 by rows: one all-reduce forward, and one backward, of the gradient of x."""
    group = oc.new_group()
    out1 = torch.matmul(copy_to(x, group), w1)
    out2 = torch.matmul(out1, w2)
    return reduce_from(out2, group)


def self_attention_on_single_process(x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor) -> Tensor:
    """The self-attention of the seed, with no heads and no softmax."""
    query, key, value = F.linear(x, w_q), F.linear(x, w_k), F.linear(x, w_v)
    attention_scores = torch.matmul(query, key.permute(0, 2, 1))
    context_layer = torch.matmul(attention_scores, value)
    return F.linear(context_layer, w_o)


def mp_self_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """All four cut; the scores are a sum over the ranks, and so is the output."""
    group = oc.new_group()
    x = copy_to(x, group)
    out_q, out_k, out_v = F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)
    # Every rank uses the scores for its part of the values: their gradients, too, are summed.
    attention_scores = oc.differentiable.all_reduce(torch.matmul(out_q, out_k.permute(0, 2, 1)))
    context_layer = torch.matmul(attention_scores, out_v)
    return reduce_from(F.linear(context_layer, wo), group)


Results = dict[str, Tensor]


def demo(folder: str = "") -> dict[str, tuple[Results, Results]]:
    """Both demos on this rank: for each, what one process has (its part) and what the divided program has."""
    rank, size = oc.get_rank(), oc.get_world_size()
    torch.manual_seed(0)
    len_a, len_b, len_c, len_d = 2, 4, 2 * size, 8
    bs, s, h = 2, 16, 3 * size
    x = torch.randn(len_a, len_b)
    mlp = {"w1": torch.randn(len_b, len_c), "w2": torch.randn(len_c, len_d)}
    y = torch.randn(bs, s, h)
    attention = {name: torch.randn(h, h) for name in ("w_q", "w_k", "w_v", "w_o")}
    cuts = {"w1": 1, "w2": 0, "w_q": 0, "w_k": 0, "w_v": 0, "w_o": 1}
    found = {}
    for name, single, parallel, data, weights in (
        ("mlp", mlp_on_one_process, mlp_by_model_parallel, x, mlp),
        ("self_attention", self_attention_on_single_process, mp_self_attention, y, attention),
    ):
        narrowed = {key: w.chunk(size, cuts[key])[rank].clone() for key, w in weights.items()}
        if folder:
            save_file({k: w.contiguous() for k, w in narrowed.items()}, Path(folder) / f"{name}_rank{rank}.safetensors")
        whole = results(single, data, weights)
        parts = {key: w.chunk(size, cuts[key])[rank] if key in cuts else w for key, w in whole.items()}
        found[name] = (parts, results(parallel, data, narrowed))
    return found


def results(program: object, data: Tensor, weights: dict[str, Tensor]) -> Results:
    """The output, and the gradients of the sum of its squares."""
    leaves = {key: w.clone().requires_grad_() for key, w in {"x": data, **weights}.items()}
    out = program(*leaves.values())  # type: ignore[operator]
    out.square().sum().backward()
    return {"out": out.detach(), **{key: leaf.grad for key, leaf in leaves.items()}}


def largest_error(parts: Results, found: Results) -> float:
    """Of all results, relative to the largest number of each."""
    return max(float((found[key] - parts[key]).abs().max() / parts[key].abs().max()) for key in parts)


def main(nproc: int = 0, folder: str = "") -> None:
    """Run both demos, on the ranks of the launcher, or on `nproc` ranks started here."""
    if nproc:
        everywhere = oc.spawn(demo, (folder,), nprocs=nproc)
    else:
        everywhere = [demo(folder)]
    for name in everywhere[0]:
        error = max(largest_error(*of_rank[name]) for of_rank in everywhere)
        print(f"{name}: out and gradients differ by {error:.1e} at most from one process")


if __name__ == "__main__":
    tyro.cli(main)

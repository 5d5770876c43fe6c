"""Random programs of views and writes, run on plain tensors and on distributed ones. A seed gives the same one on every rank."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

import onecard as oc
from onecard.errors import OnecardError

Draw = random.Random
View = Callable[[Tensor], Any]  # gives one view or several
Write = Callable[[Tensor, Tensor], Any]  # writes to the first tensor what the second one says


class Refused(Exception):
    """The distributed program ended in an error of onecard."""


class Wrong(AssertionError):
    """The distributed program went on otherwise than the plain one."""


def view_of(r: Draw, x: Tensor) -> tuple[str, View]:
    """A view operator with arguments that fit."""
    if x.dim() == 0:
        return r.choice(
            [
                ("unsqueeze(0)", lambda t: t.unsqueeze(0)),
                ("detach()", lambda t: t.detach()),
                ("expand(3)", lambda t: t.expand(3)),
            ]
        )
    d = r.randrange(x.dim())
    n = max(x.shape[d], 1)
    e = r.randrange(x.dim())
    start, stop, step = r.randrange(n), r.randint(0, n + 1), r.choice((1, 1, 1, 2, 3))
    order = r.sample(range(x.dim()), x.dim())
    at, length = r.randrange(n), r.randint(1, n)
    shape = _factors(r, x.numel())
    count, size, hop, offset = r.randint(1, n), r.randint(1, n), r.randint(1, 3), r.randint(-1, 1)
    where = (slice(None),) * d
    choices: list[tuple[str, View]] = [
        (f"[{d}: {start}:{stop}:{step}]", lambda t: t[(*where, slice(start, stop, step))]),
        (f"select({d}, {at})", lambda t: t.select(d, at)),
        (f"narrow({d}, {at}, ..)", lambda t: t.narrow(d, at, min(length, n - at))),
        (f"transpose({d}, {e})", lambda t: t.transpose(d, e)),
        (f"permute({order})", lambda t: t.permute(order)),
        (f"view({shape})", lambda t: t.view(shape)),
        (f"reshape({shape})", lambda t: t.reshape(shape)),
        ("flatten()", lambda t: t.flatten()),
        (f"unsqueeze({d})", lambda t: t.unsqueeze(d)),
        ("squeeze()", lambda t: t.squeeze()),
        (f"squeeze({d})", lambda t: t.squeeze(d)),
        ("expand(2, ...)", lambda t: t.expand(2, *t.shape)),
        (f"split({count}, {d})", lambda t: t.split(count, d)),
        (f"chunk({count}, {d})", lambda t: t.chunk(count, d)),
        (f"unbind({d})", lambda t: t.unbind(d)),
        (f"unfold({d}, {size}, {hop})", lambda t: t.unfold(d, size, hop)),
        ("detach()", lambda t: t.detach()),
        (".data", lambda t: t.data),
        ("[None, ..., -1]", lambda t: t[None, ..., -1]),
    ]
    if x.dim() > 1 and d != e:
        choices.append((f"diagonal({offset}, {d}, {e})", lambda t: t.diagonal(offset, d, e)))
    return r.choice(choices)


def _factors(r: Draw, numel: int) -> list[int]:
    shape = []
    while numel > 1 and len(shape) < 3:
        size = r.choice([k for k in range(1, numel + 1) if numel % k == 0])
        shape.append(size)
        numel //= size
    return [*shape, numel]


def write_of(r: Draw, x: Tensor, grad: bool) -> tuple[str, Write]:
    """An operator that writes to a tensor like ``x``; if ``grad``, one that torch can differentiate."""
    d = r.randrange(x.dim()) if x.dim() else 0
    n = max(x.shape[d], 1) if x.dim() else 1
    number, at, step = r.randint(-3, 3), r.randrange(n), r.choice((1, 2))
    mask = torch.tensor([r.random() < 0.4 for _ in range(x.numel())]).view(x.shape)
    rows = torch.tensor(r.sample(range(n), r.randint(1, n)))
    choices: list[tuple[str, Write]] = [
        (f"add_({number})", lambda t, v: t.add_(number)),
        (f"mul_({number})", lambda t, v: t.mul_(number)),
        ("add_(value)", lambda t, v: t.add_(v)),
        ("sub_(value, alpha=2)", lambda t, v: t.sub_(v, alpha=2)),
        ("mul_(value)", lambda t, v: t.mul_(v)),
        ("copy_(value)", lambda t, v: t.copy_(v)),
        ("addcmul_(value)", lambda t, v: t.addcmul_(v, v)),
        ("lerp_(value)", lambda t, v: t.lerp_(v, 0.5)),
        ("zero_()", lambda t, v: t.zero_()),
        (f"fill_({number})", lambda t, v: t.fill_(number)),
        ("clamp_", lambda t, v: t.clamp_(-2, 2)),
        ("relu_", lambda t, v: t.relu_()),
        ("neg_", lambda t, v: t.neg_()),
        ("masked_fill_", lambda t, v: t.masked_fill_(mask, number)),
        ("[mask] = number", lambda t, v: t.__setitem__(mask, number)),
        ("[...] = value", lambda t, v: t.__setitem__(..., v)),
        ("add(value, out=)", lambda t, v: torch.add(t, v, out=t)),
        ("mul(value, 2, out=)", lambda t, v: torch.mul(v.expand(t.shape), 2, out=t)),
        ("_foreach_mul_", lambda t, v: torch._foreach_mul_([t], number)),
        ("_foreach_copy_", lambda t, v: torch._foreach_copy_([t], [v.expand(t.shape).clone()])),
        ("_foreach_zero_", lambda t, v: torch._foreach_zero_([t])),
        (".data.add_", lambda t, v: t.data.add_(number)),
    ]
    if not grad:
        choices.append(("_fused_sgd_", _sgd))
        choices.append(("_foreach_add_ twice", lambda t, v: torch._foreach_add_([t, t], [v.expand(t.shape)] * 2)))
    if x.dim():
        where = (slice(None),) * d
        choices += [
            (f"[{d}: {at}] = number", lambda t, v: t.__setitem__((*where, at), number)),
            (f"[{d}: {at}::{step}] = number", lambda t, v: t.__setitem__((*where, slice(at, None, step)), number)),
            (f"[{d}: {at}:] += 1", lambda t, v: t[(*where, slice(at, None))].__iadd__(1)),
            (f"[{d}: rows] = number", lambda t, v: t.__setitem__((*where, rows), number)),
            (f"index_fill_({d}, rows)", lambda t, v: t.index_fill_(d, rows, number)),
            (f"index_add_({d}, rows)", lambda t, v: t.index_add_(d, rows, t.detach().index_select(d, rows).clone())),
            ("cumsum(out=)", lambda t, v: torch.cumsum(t.detach().clone(), d, out=t)),
            (
                "index_put_ accumulate",
                lambda t, v: t.index_put_((torch.tensor([0, 0]),), torch.ones(()), accumulate=True),
            ),
        ]
    if x.dim() == 2:
        choices.append(("triu_", lambda t, v: t.triu_()))
    return r.choice(choices)


def write_to_two(r: Draw) -> tuple[str, Write]:
    """A foreach operator on two tensors, which may share memory."""
    number = r.randint(-2, 2)
    return r.choice(
        [
            ("_foreach_add_ both", lambda a, b: torch._foreach_add_([a, b], number)),
            ("_foreach_mul_ both", lambda a, b: torch._foreach_mul_([a, b], 2)),
            ("_foreach_addcmul_ both", lambda a, b: torch._foreach_addcmul_([a, b], [a + 1, b + 1], [a - 1, b - 1])),
            ("_fused_sgd_ both", lambda a, b: _fused([a, b], [a.detach() + 1, b.detach() + 1])),
        ]
    )


def _sgd(t: Tensor, v: Tensor) -> None:
    _fused([t], [v.detach().expand(t.shape).contiguous()])


def _fused(params: list[Tensor], grads: list[Tensor]) -> None:
    if not all(p.is_contiguous() for p in params):
        raise RuntimeError("torch's kernel writes beyond a tensor that is not dense")
    options = dict(weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False, maximize=False)
    torch._fused_sgd_(params, grads, [], is_first_step=False, **options)


class Program:
    """A random program, run as it is drawn: each step on the plain tensors first.

    What torch itself refuses or deprecates is left out. ``log`` holds its text.
    """

    def __init__(self, seed: int, mesh: oc.ProcessMesh, grad: bool = False) -> None:
        self.r, self.mesh, self.grad = Draw(seed), mesh, grad
        self.log: list[str] = []
        self.plain: list[Tensor] = []
        self.roots: list[Tensor] = []
        self.dist: list[Tensor] = []
        self.leaves: list[tuple[Tensor, Tensor]] = []
        for _ in range(self.r.randint(1, 2)):
            self.begin()

    def begin(self) -> None:
        """One more tensor, laid out at random."""
        r = self.r
        shape = [r.randint(1, 5) for _ in range(r.randint(1, 3))]
        whole = torch.tensor([float(r.randint(-4, 4)) for _ in range(torch.Size(shape).numel())]).view(shape).double()
        options = [oc.Replicate(), *(oc.Shard(d) for d in range(len(shape))), *(oc.Shard(d) for d in range(len(shape)))]
        placements = [r.choice([*options, oc.Partial()]) for _ in range(self.mesh.ndim)]
        self.log.append(f"{len(self.plain)} = {shape} {placements}")
        dist = oc.shard_tensor(whole, self.mesh, placements)
        if self.grad:
            self.leaves.append((whole.requires_grad_(), dist.requires_grad_()))
        self.add(whole.clone(), dist.clone())

    def add(self, plain: Tensor, dist: Tensor) -> None:
        """Results of both programs."""
        self.plain.append(plain)
        self.dist.append(dist)
        if not any(_shared(plain, root) for root in self.roots):
            self.roots.append(plain)
        if plain.shape != dist.shape or plain.dtype != dist.dtype or plain.stride() != dist.stride():
            self.fail(f"{plain.shape} {plain.stride()} became {dist.shape} {dist.stride()}")

    def fail(self, why: str) -> None:
        """It went wrong."""
        raise Wrong("\n".join([*self.log, why]))

    def both(self, name: str, run: Callable[..., Any], *at: int) -> Any:
        """One step; None if torch refuses it."""
        for t in (*self.plain, *self.dist):
            with suppress(RuntimeError):
                _ = t.grad_fn  # torch makes a view's anew where it is looked at, and without it says "a leaf"
        before = [root.detach().clone() for root in self.roots]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                plain = run(*(self.plain[i] for i in at))
        except (RuntimeError, IndexError, UserWarning):
            for root, value in zip(self.roots, before, strict=True):
                root.data.copy_(value)  # torch may have written some of it
            return None
        self.log.append(f"{list(at)} {name}")
        try:
            return plain, run(*(self.dist[i] for i in at))
        except OnecardError as fault:
            raise Refused(f"{name}: {fault}") from fault
        except Exception as fault:
            self.fail(f"{type(fault).__name__}: {fault}")

    def step(self) -> None:
        """Draw and run one step."""
        r, i = self.r, self.r.randrange(len(self.plain))
        kind = r.random()
        if kind < 0.45:
            made = self.both(*view_of(r, self.plain[i]), i)
            for plain, dist in zip(*(m if isinstance(m, list | tuple) else [m] for m in made or ((), ())), strict=True):
                self.add(plain, dist)
        elif kind < 0.8:
            j = self.value_for(i)
            name, write = write_of(r, self.plain[i], self.grad)
            shared = _shared(self.plain[i], self.plain[j])
            self.both(name, lambda a, b: write(a, b.clone() if shared else b), i, j)
        elif kind < 0.9 and not self.grad:  # torch's gradients of lists that share memory are wrong
            self.both(*write_to_two(r), i, r.randrange(len(self.plain)))
        else:
            self.check(i)

    def value_for(self, i: int) -> int:
        """A tensor that broadcasts to another one."""
        fits = [j for j, t in enumerate(self.plain) if _broadcasts(t, self.plain[i])]
        return self.r.choice(fits)

    def check(self, i: int) -> None:
        """Read a tensor."""
        self.log.append(f"[{i}] read")
        try:
            dist = self.dist[i].detach().full_tensor()  # type: ignore[attr-defined]
        except OnecardError as fault:
            raise Refused(f"read: {fault}") from fault
        if not torch.allclose(dist, self.plain[i].detach(), equal_nan=True):
            self.fail(f"{i} is\n{dist}\nand should be\n{self.plain[i].detach()}")

    def check_gradients(self) -> None:
        """Backward from everything."""
        expected = ""
        try:
            sum((k + 1) * (t * t.detach()).sum() for k, t in enumerate(self.plain)).backward()
        except RuntimeError as fault:
            expected = str(fault)  # what backward needs was written to
        self.log.append("backward")
        try:
            sum((k + 1) * (t * t.detach()).sum() for k, t in enumerate(self.dist)).backward()
        except Exception as fault:
            if expected:
                return
            if isinstance(fault, OnecardError):
                raise Refused(f"backward: {fault}") from fault
            self.fail(f"{type(fault).__name__}: {fault}")
        if "modified by an inplace operation" in expected:
            self.fail(f"should have been refused: {expected}")
        if expected:
            return  # torch cannot write gradients of expanded views
        for k, (plain, dist) in enumerate(self.leaves):
            if (plain.grad is None) != (dist.grad is None):
                self.fail(f"gradient {k}: {plain.grad} became {dist.grad}")
            if plain.grad is not None and not torch.allclose(dist.grad.full_tensor(), plain.grad, equal_nan=True):
                self.fail(f"gradient {k} is\n{dist.grad.full_tensor()}\nand should be\n{plain.grad}")


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(a.shape, b.shape) == b.shape
    except RuntimeError:
        return False


def _shared(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def run(seed: int, mesh: oc.ProcessMesh, grad: bool = False, steps: int = 14) -> str:
    """Run a program. Returns why it was refused, or nothing. Raises ``Wrong``."""
    try:
        program = Program(seed, mesh, grad)
        for _ in range(steps):
            program.step()
        for i in range(len(program.plain)):
            program.check(i)
        if grad:
            program.check_gradients()
    except Refused as refusal:
        return str(refusal)
    return ""


def run_many(seeds: Iterable[int], mesh: oc.ProcessMesh, grad: bool = False) -> Counter[str]:
    """Refusals by their beginning."""
    found: Counter[str] = Counter()
    torch.set_warn_always(True)
    for seed in seeds:
        try:
            refusal = run(seed, mesh, grad)
        except Wrong as fault:
            raise Wrong(f"seed {seed}\n{fault}") from None
        if refusal:
            found[refusal[:100]] += 1
    return found

"""Random operators: values are a function of a key and of each element's index in the whole tensor (see onecard.random).

Every operator draws one key from torch's generator, on each rank alike, and fills only the part that the rank holds. The
same handlers serve DistTensors and, under ``one_card_random``, plain tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard.comm.agree.agree import first_to_say, when_met
from onecard.comm.base.state import Kept
from onecard.comm.issue import trace
from onecard.comm.world import world
from onecard.errors import DispatchError
from onecard.place.layout import Layout, is_merged
from onecard.random import Key, Law
from onecard.recorded import is_sketching, unrecorded
from onecard.rules.call import arguments, schema_of
from onecard.tensor.aliasing import memory
from onecard.tensor.dispatch.entries import handler
from onecard.tensor.dist_tensor import DistTensor, describe, wrap
from onecard.tensor.random_operators.of_batch import of_batch
from onecard.tensor.spec import Spec

aten = torch.ops.aten


def _forms(names: str) -> list[Any]:
    """The overloads of operators, without ``out=``."""
    packets = [getattr(aten, name) for name in names.split()]
    return [getattr(p, overload) for p in packets for overload in p.overloads() if not overload.endswith("out")]


def _factories(names: str) -> list[Any]:
    """The overloads that make a tensor of a given size, or write to one of it."""
    packets = [getattr(aten, name) for name in names.split()]
    forms = [getattr(p, overload) for p in packets for overload in p.overloads() if "names" not in overload]
    return [form for form in forms if "size" in schema_of(form).arguments]


def fill(x: Tensor, law: Law, key: Key, name: str = "fill") -> Tensor:
    """Fill a plain or distributed tensor in place; each rank its part."""
    if not isinstance(x, DistTensor):
        return random.fill(x, law, key)
    memory.check_writable(x, name)
    x.reduce_partial()
    spec = x._spec
    if spec.here:
        layout, shape, local = spec.layout, spec.shape, x._local
        if layout.merged:  # with its merged dims taken apart: the same places in the whole
            key = key.with_dims(
                [[p.size for p in d] if is_merged(d) else [n] for d, n in zip(layout.dims, shape, strict=True)]
            )
            layout, shape = layout.opened(shape)  # type: ignore[assignment]
            local = local.view(layout.local_shape(shape))
        random.fill(local, law, key, shape, layout.local_offset(shape))
    memory.wrote(x)
    return x


def key_for(func: Any, like: Any, generator: Any, shape: Sequence[int] | None = None) -> Key:
    """The key of one operator. Ranks compare the first, second, fourth, eighth, ... that they draw on a mesh.

    ``shape``: of what is drawn, if it is not that of ``like``.
    """
    key = of_batch(generator, like.shape if shape is None else shape)
    if isinstance(like, DistTensor) and not _by_stage.here:
        compare_keys(key, func, like.shape, like.mesh, like._spec.here)
    return key


def compare_keys(key: Key, func: Any, shape: Sequence[int], mesh: Any, here: bool) -> None:
    """One more draw on a mesh: all of its ranks have the same."""
    if isinstance(key.low, int):
        _draws.here[mesh] += 1
        count = _draws.here[mesh]
        if count & (count - 1) == 0 and here:
            label, word = f"{mesh!r}/{count}", f"{key.high << 32 | key.low:016x} for {func} {list(shape)}"
            when_met(lambda: _compare(label, word))


_by_stage: Kept[bool] = Kept(bool)


def by_stage() -> AbstractContextManager[None]:
    """A rank draws what only its own stages have, or looks at what it would draw: nothing is compared with other ranks' draws."""
    return _by_stage.during(True)


_draws: Kept[Counter[Any]] = Kept(Counter)


def _compare(label: str, word: str) -> None:
    first = first_to_say(label, word)
    if first is not None and first[1] != word:
        raise DispatchError(
            f"rank {world.get_rank()} draws with key {word}, but rank {first[0]} with {first[1]}: random operators must draw "
            "the same on every rank. Seed all alike (onecard.manual_seed(s)), and draw from torch's default generator on "
            "every rank or on none; what one rank alone draws needs a generator of its own (generator=...)"
        )


@lru_cache(4096)
def _law(func: Any, dtype: torch.dtype, *params: Any) -> Law:
    """The law of a call of an in-place operator, its parameters checked by torch itself."""
    with unrecorded():
        func(torch.empty(0, dtype=dtype, device="cpu"), *params)
    return random.law(schema_of(func).name, dtype, *params)


def _options(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Of a tensor that is to be made, those that the call names (a schema's own default is an int for a dtype)."""
    listed = names or ("dtype", "layout", "device", "pin_memory", "memory_format")
    return {n: given[n] for n in listed if given.get(n) is not None and type(given[n]) is not int}


@handler(
    *_forms("uniform_ normal_ log_normal_ exponential_ cauchy_ geometric_ random_"), aten.bernoulli_.float, draws=True
)
def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """x.normal_() and its kin."""
    given = arguments(func, args, kwargs)
    x, generator = given.pop("self"), given.pop("generator")
    return fill(x, law_of(func, x.dtype, given), key_for(func, x, generator), schema_of(func).name)


def law_of(func: Any, dtype: torch.dtype, params: dict[str, Any]) -> Law:
    """The law of an in-place operator."""
    if schema_of(func).name == "random_":
        func, params = _INTEGERS, {"low": params.get("from", 0), "high": params.get("to")}
    return _law(func, dtype, *params.values())


_INTEGERS = getattr(aten.random_, "from")


_SAME = {"rand": aten.uniform_.default, "randn": aten.normal_.default, "normal": aten.normal_.default}


def _of(func: Any, given: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The in-place operator that fills what a factory makes, and its parameters."""
    name = schema_of(func).name.removesuffix("_like")
    if name == "randint":
        return _INTEGERS, (_number(given.get("low", 0)), _number(given["high"]))
    return _SAME[name], (given["mean"], given["std"]) if name == "normal" else ()


def factory_law(func: Any, dtype: torch.dtype, given: dict[str, Any]) -> Law:
    """The law of ``rand``, ``randn``, ``randint``, ``normal`` and their kin."""
    maker, params = _of(func, given)
    return _law(maker, dtype, *params)


@handler(*_forms("rand_like randn_like randint_like"), draws=True)
def _like(func: Any, args: Any, kwargs: Any) -> Any:
    """rand_like(x) and its kin: in the layout of x."""
    given = arguments(func, args, kwargs)
    x = given["self"]
    made = torch.empty_like(x, **_options(given, *(("dtype", "memory_format") if isinstance(x, DistTensor) else ())))
    return fill(made, factory_law(func, made.dtype, given), key_for(func, made, given.get("generator")))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


@handler(*_factories("rand randn randint normal"), draws=True)
def _factory(func: Any, args: Any, kwargs: Any) -> Any:
    """rand(size) and its kin, as a plain tensor; rand(size, out=x)."""
    given = arguments(func, args, kwargs)
    made = given.get("out")
    if made is None:
        integer = {"dtype": torch.int64} if schema_of(func).name == "randint" else {}
        made = torch.empty(given["size"], **{**integer, **_options(given)})
    elif made.shape != torch.Size(given["size"]):
        made = _resized(made, given["size"])
    return fill(made, factory_law(func, made.dtype, given), key_for(func, made, given.get("generator")))


def _resized(out: Tensor, size: Any) -> Tensor:
    if isinstance(out, DistTensor):
        raise DispatchError(f"out= is {describe(out)}, the result is {list(size)}; make them alike")
    return out.resize_(size)


@handler(aten.randperm.default, aten.randperm.generator, draws=True)
def _randperm(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    options = _options(given)
    key, device = of_batch(given.get("generator"), (given["n"],)), options.get("device", "cpu")
    return random.permutation(given["n"], key, device=device).to(options.get("dtype", torch.int64))


def _below(func: Any, x: Tensor, p: Tensor, generator: Any) -> Tensor:
    """Where a uniform number is below a probability; in the layout of x."""
    words = torch.empty_like(x, dtype=torch.int64)
    fill(words, random.law("words", torch.int64), key_for(func, x, generator))
    return words.to(torch.float64).mul_(2.0**-32) < p


@handler(*_forms("bernoulli"), draws=True)
def _bernoulli(func: Any, args: Any, kwargs: Any) -> Any:
    """bernoulli(x), with probabilities from x, and bernoulli(x, p)."""
    given = arguments(func, args, kwargs)
    x, p = given["self"], given.get("p")
    if p is None:
        return _below(func, x, x, given["generator"]).to(x.dtype)
    if isinstance(p, Tensor):
        return _below(func, x, p, given["generator"]).to(x.dtype)
    made = torch.empty_like(x)
    return fill(made, _law(aten.bernoulli_.float, x.dtype, p), key_for(func, x, given["generator"]))


@handler(aten.bernoulli_.Tensor, draws=True)
def _bernoulli_tensor_(func: Any, args: Any, kwargs: Any) -> Any:
    given = arguments(func, args, kwargs)
    x = given["self"]
    return x.copy_(_below(func, x, given["p"], given["generator"]))


@handler(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor, draws=True)
def _normal(func: Any, args: Any, kwargs: Any) -> Any:
    """normal(mean, std) with one or two tensors."""
    given = arguments(func, args, kwargs)
    mean, std = given["mean"], given["std"]
    like = mean + std if isinstance(mean, Tensor) and isinstance(std, Tensor) else torch.empty_like(_tensor(mean, std))
    made = torch.empty_like(like)
    fill(made, _law(aten.normal_.default, made.dtype, 0.0, 1.0), key_for(func, made, given["generator"]))
    return made.mul_(std).add_(mean)


def _tensor(*values: Any) -> Tensor:
    return next(v for v in values if isinstance(v, Tensor))


@handler(*_forms("native_dropout"), draws=True)
def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """native_dropout(x, p, train) -> (result, mask)."""
    given = arguments(func, args, kwargs)
    x, p = given["input"], given["p"]
    if not given["train"]:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool)
    fill(mask, _law(aten.bernoulli_.float, torch.bool, 1 - p), key_for(func, x, None))
    return (x * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


@handler(*_forms("rrelu_with_noise"), draws=True)
def _rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    """rrelu_with_noise: the slope of each negative element is drawn, and kept in ``noise`` for the backward operator."""
    given = arguments(func, args, kwargs)
    x, noise, lower, upper = given["self"], given["noise"], given["lower"], given["upper"]
    if not given["training"]:
        slope = (lower + upper) / 2
        return torch.where(x <= 0, x * slope, x)
    slopes = torch.empty_like(x)
    fill(slopes, _law(aten.uniform_.default, x.dtype, lower, upper), key_for(func, x, given["generator"]))
    noise.copy_(torch.where(x <= 0, slopes, torch.ones_like(slopes)))
    return x * noise


@handler(*_forms("multinomial"), draws=True)
def _multinomial(func: Any, args: Any, kwargs: Any) -> Any:
    """Indices drawn with the probabilities in the last dim, which each rank needs whole."""
    given = arguments(func, args, kwargs)
    x, count, again = given["self"], given["num_samples"], given["replacement"]
    with unrecorded():
        aten.multinomial(torch.empty(x.shape, dtype=x.dtype, device="meta"), count, again)  # torch's own checks
    key = key_for(func, x, given["generator"])
    if not isinstance(x, DistTensor):
        return _choose(x, count, again, key, tuple(x.shape), (0,) * x.dim())
    layout = Layout.make(x.mesh, (*x._spec.layout.in_one_piece().dims[:-1], ()))
    local = x._become(layout, "multinomial", "self", "probabilities must be whole", explicit=False)
    shape = torch.Size((*x.shape[:-1], count))
    meta = torch.empty(shape, dtype=torch.int64, device="meta")
    spec = Spec.like(layout, meta, x._spec.device)
    if not spec.here:
        return wrap(torch.empty(0, dtype=torch.int64, device=spec.device), spec)
    return wrap(_choose(local, count, again, key, tuple(x.shape), layout.local_offset(x.shape)), spec)


def _choose(p: Tensor, count: int, again: bool, key: Key, shape: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
    """Rows of probabilities -> rows of indices.

    Without replacement by a race of exponential variates (Efraimidis and Spirakis, 2006), with it by inversion.
    """
    if p.device.type == "cpu" and not trace.faking() and not is_sketching():
        _check_probabilities(p, 1 if again else count)
    if again and count > 1:
        ends = p.double().cumsum(-1)  # in order, row by row: sums alike under every layout
        total = ends[..., -1:]
        u = torch.empty((*p.shape[:-1], count), dtype=torch.float64, device=p.device)
        random.fill(u, random.law("uniform_", torch.float64), key, (*shape[:-1], count), offset)
        return torch.searchsorted(ends, torch.minimum(u * total, torch.nextafter(total, total * 0)), right=True)
    dtype = p.dtype if p.dtype is torch.float64 else torch.float32
    arrival = torch.empty(p.shape, dtype=dtype, device=p.device)
    random.fill(arrival, random.law("exponential_", dtype), key, shape, offset)
    speed = p.to(dtype) / arrival
    return speed.argmax(-1, keepdim=True) if count == 1 else speed.topk(count).indices


def _check_probabilities(p: Tensor, count: int) -> None:
    if not bool(((p >= 0) & (p < torch.inf)).all()):
        raise RuntimeError("multinomial: the probability tensor contains inf, nan or an element < 0")
    if not bool(((p > 0).sum(-1) >= count).all()):
        raise RuntimeError(f"multinomial: a row has fewer than {count} categories of probability > 0")

"""Plans: which rank has which tokens and by which algorithm they attend, decided from the mask alone."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..spec import Mask, as_int, is_int
from ..validation import EVERYTHING, validated
from .exchange import REFUSALS, Route, agree, digest, exchange, replicated
from .layouts import LAYOUTS, Layout, choose
from .masks import Visibility, on

ALGORITHMS = {
    "gather": ("contiguous", *LAYOUTS),
    "ring": ("contiguous", "zigzag"),  # the keys of a rank then are in few runs, each of which is a call
    "heads": ("contiguous",),  # each rank computes some heads of all tokens, wherever they lie
}
"""The layouts among which the choice is, by algorithm."""

_MOST_SCHEDULES = 64
_T = TypeVar("_T")


def plan(
    mask: Mask | None,
    n: int | tuple[int, int],
    mesh: DeviceMesh | dist.ProcessGroup | int,
    *,
    layout: str | None = None,
    algorithm: str | tuple[str, str] | None = None,
    most_keys: int | None = None,
    key_cost: float = 500.0,
) -> Plan:
    """Plan of attention over the ranks of a group: who has which tokens, and what they send each other.

    A function of its arguments alone: nothing is sent, so every rank makes the same plan from the same mask. It takes
    O(ranks * samples * n_k) memory, and never looks at pairs, unless `mask.dense` has them.

    Layouts, of which one is chosen that keeps the busiest rank's max(pairs, key_cost * keys received) within 4 % of
    the least, and of these the one that receives the fewest keys:

    - "contiguous": one run of tokens for each rank, as `torch.chunk` and DTensor have them.
    - "zigzag": two runs, one from each half.
    - "in runs": equal work in equal numbers of tokens, most of them of the same documents.
    - "longest first": equal work in equal numbers of tokens, from anywhere.

    Algorithms, whose results differ by rounding alone:

    - "gather": a rank gets the keys that its queries see from the ranks that have them, each key once, and computes in
      one call. The default: it sends the least, and holds all keys that its queries see.
    - "ring": keys go from rank to rank as far as somebody sees them, while those that are there are computed. A rank
      holds its own keys, and those of two others. Chosen where a rank would receive more than `most_keys`. It has
      first derivatives only.
    - "heads": a rank gets all tokens that are not padding, and computes some of the heads. Key heads that more than one
      rank needs are sent to each. By name only.
    - ("heads", "gather") or ("heads", "ring"): both, on a mesh of two dimensions. Ranks along its first dimension share
      heads, and each line of ranks along the second one attends with those by the algorithm named second. By name only.

    Args:
        mask: which keys each query may see: that of all tokens, with the same values on every rank. None is all.
        n: number of tokens, if queries and keys are of the same ones; or (n_q, n_k), and the keys then are contiguous.
        mesh: the ranks that share each sample: a DeviceMesh of one dimension, as `mesh["cp"]`, or a ProcessGroup; or a
            DeviceMesh of two dimensions for two algorithms. An int is a number of ranks that need not exist, for the
            figures of a plan.
        layout, algorithm: names from above, or None to choose.
        most_keys: the most keys that a rank may get from others, in all samples together; None is no limit.
        key_cost: number of pairs of a query and a key whose scores and values all heads compute in the time in which
            one key and its value arrive: H_kv * bytes_of_a_number * rate / (2 * H * bandwidth), with the floating-point
            operations and the bytes received in a second. 500 is that of 200e12 and 50e9, in bf16, with 8 query heads
            for each key head.

    Returns:
        A `Plan`.

    Raises:
        ValueError: an argument is not what is said here, or this process is none of the ranks.

    Example:
        >>> import fastattn
        >>> plan = fastattn.parallel.plan(fastattn.Mask(causal=True), 4096, 8)
        >>> plan.layout, [round(share, 2) for share in (plan.work / plan.work.mean()).tolist()]
        ('zigzag', [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    """
    lengths = n if isinstance(n, tuple) else (n, n)
    if len(lengths) != 2 or not all(is_int(as_int(x)) and 0 <= as_int(x) < 2**31 for x in lengths):
        raise ValueError(f"n must be an int, at least 0, or a pair (n_q, n_k) of them, got {n!r}")
    n_q, n_k = map(as_int, lengths)
    if isinstance(algorithm, tuple):
        return _product(mask, n, mesh, algorithm, layout, most_keys, key_cost)
    for name, value, known in (("layout", layout, ALGORITHMS["gather"]), ("algorithm", algorithm, ALGORITHMS)):
        if value is not None and (not isinstance(value, str) or value not in known):
            raise ValueError(f"{name} must be {', '.join(map(repr, known))} or None, got {value!r}")
    if most_keys is not None and not is_int(most_keys):
        raise ValueError(f"most_keys must be an int or None, got {most_keys!r}")
    if isinstance(key_cost, bool) or not isinstance(key_cost, (int, float)) or not 0 <= key_cost < math.inf:
        raise ValueError(f"key_cost must be a finite number, at least 0, got {key_cost!r}")
    group, rank, ranks = _group_of(mesh)
    mask = EVERYTHING if mask is None else mask
    _check_fit(mask, n_q, n_k)
    visibility = Visibility(on(mask, "cpu"), n_q, n_k)

    def chosen(algorithm: str) -> Layout:
        among = ALGORITHMS[algorithm] if layout is None else (layout,)
        return choose(visibility, ranks, not isinstance(n, tuple), among, key_cost)

    result = chosen(algorithm or "gather")
    if algorithm is None and most_keys is not None and result.received.max() > most_keys:
        algorithm = "ring"
        result = chosen(algorithm)
    return Plan(mask, n_q, n_k, rank, ranks, group, algorithm or "gather", result)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Who has which tokens of a batch, and how they attend: made by `fastattn.parallel.plan`.

    `fastattn.attention(q, k, v, mask, plan=plan)` takes the local parts of q, k and v and the mask of all tokens. That
    may be another mask than the plan was made for, as in models whose layers have several: what is sent follows the
    mask of the call, and where tokens lie follows the plan.

    Args:
        mask: that of the plan, and of calls without one.
        n_q, n_k: numbers of all queries and all keys.
        rank, ranks: of this process in the group, None where there is none; and how many there are.
        group: the ProcessGroup, or None; of two algorithms, that of the first.
        algorithm: its name, or two.
        across: of two algorithms, the plan of the second among the ranks of the second dimension.
    """

    mask: Mask
    n_q: int
    n_k: int
    rank: int | None
    ranks: int
    group: dist.ProcessGroup | None
    algorithm: str | tuple[str, str]
    _layout: Layout
    across: Plan | None = None
    _schedules: dict[tuple, tuple] = field(default_factory=dict)
    _key: Tensor = field(init=False)  # a tensor, so that a graph is compiled once for the plans of all batches

    def __post_init__(self) -> None:
        number = next(_NUMBERS)
        with torch.inference_mode(False):  # a compiled training step may be the next to use it
            object.__setattr__(self, "_key", torch.tensor(number, device="cpu"))
        _PLANS[number] = self

    @property
    def together(self) -> bool:
        """Whether query i and key i are of one token, as in self-attention."""
        return self._layout.owner_k is self._layout.owner_q

    @property
    def layout(self) -> str:
        """The name of the layout."""
        return self._layout.name

    @property
    def work(self) -> Tensor:
        """float64 [ranks]: the pairs of a query and a key that it sees, for each rank and all samples of the mask."""
        return self._layout.work

    @property
    def received(self) -> Tensor:
        """int64 [ranks]: the keys that each rank needs of others, in all samples of the mask."""
        return self._layout.received

    def __repr__(self) -> str:
        mean = self.work.mean().item()
        names = self.algorithm if isinstance(self.algorithm, str) else " and ".join(self.algorithm)
        return (
            f"Plan of {self.n_q} queries and {self.n_k} keys on {self.ranks} ranks: {names}, {self.layout}; "
            f"work of the busiest rank {self.work.max().item() / mean if mean else 1:.2f} of the mean, keys received "
            f"{self.received.max().item()} at most"
        )

    def shard(self, x: Tensor, dim: int, *, of: str = "queries") -> Tensor:
        """The tokens of this rank of a tensor of all tokens: `x` with fewer entries along `dim`, differentiable.

        Args:
            x: a tensor with n_q, or n_k, entries along `dim`.
            dim: the dimension of the tokens.
            of: "queries" or "keys"; the same in self-attention.

        Returns:
            A copy of the tokens of this rank, in their order.

        Raises:
            ValueError: an argument is not what is said here, or this process is none of the ranks.
        """
        rows = self._rows(of)
        _check_tokens("x", x, dim, self._length(of))
        return x.index_select(dim, rows.to(x.device))

    def unshard(self, y: Tensor, dim: int, *, of: str = "queries") -> Tensor:
        """The tensor of all tokens, on every rank, from the tokens that each has. Every rank has to call it.

        The gradient of `y` is the sum over the ranks of the gradients that arrive at the results for its tokens.

        Args:
            y: the tokens of this rank, along `dim` in their order; with the same other sizes on every rank.
            dim, of: see `shard`.

        Returns:
            A tensor with n_q, or n_k, entries along `dim`.

        Raises:
            ValueError: an argument is not what is said here, on any rank, or this process is none of the ranks.
        """
        group, error, number = self._known_group(), None, 0
        try:
            rows = self._rows(of)
            _check_tokens("y", y, dim, len(rows), f" on rank {self.rank}")
            sizes = y.movedim(dim, 0).shape[1:]
            differentiable = torch.is_grad_enabled() and y.requires_grad
            number = digest(self._digest, of, sizes, y.dtype, differentiable)
        except REFUSALS as refusal:
            error = refusal
        device = y.device if isinstance(y, Tensor) else torch.device("cpu")
        agree(number, error, None, device, self._groups(), "plan, of, and the dtype, sizes and requires_grad of y")
        part, places = self._part(of)
        mine = [torch.arange(len(rows), device="cpu")] * len(places)
        route = Route.of(mine, places, len(rows), len(part), y.device)
        sent = y.movedim(dim, 0).reshape(len(rows), sizes.numel())
        if differentiable:
            whole = exchange(sent, route, group)
        else:  # as bytes, since it may be of a dtype that the group cannot send
            whole = exchange(sent.contiguous().view(torch.uint8), route, group).view(y.dtype)
        whole = whole.view(len(part), *sizes).movedim(0, dim)
        return whole if self.across is None else self.across.unshard(whole, dim, of=of)

    def attending(self, source: Plan, mask: Mask | None = None) -> Plan:
        """Plan of the attention of this plan's tokens to those of another, as of a decoder's to an encoder's.

        Args:
            source: the plan of the keys, for the same ranks.
            mask: which keys each query may see. None is all that are no padding by the masks of the two plans and,
                where both masks have documents, of the same document.

        Returns:
            A `Plan` whose queries lie as in this plan, and its keys as in `source`.

        Raises:
            ValueError: the plans are of different ranks, or the mask is of other lengths.
        """
        if not isinstance(source, Plan):
            raise ValueError(f"source must be made by fastattn.parallel.plan, got {type(source).__name__}")
        if (self._groups(), self.rank) != (source._groups(), source.rank):
            raise ValueError(f"source must be of the same ranks as this plan, {self!r}, got {source!r}")
        if mask is None:
            ids, of_source = self.mask.segment_ids, source.mask.segment_ids
            real = self.mask.readable_queries()
            mask = Mask(
                real_keys=source.mask.readable_keys(),
                real_queries=self.mask.readable_keys() if real is None and self.together else real,
                segment_ids=None if ids is None or of_source is None else (ids[0], of_source[1]),
            )
        _check_fit(mask, self.n_q, source.n_k)
        visibility = Visibility(on(mask, "cpu"), self.n_q, source.n_k)
        layout = Layout.of(self.layout, visibility, self.ranks, self._layout.owner_q, source._layout.owner_k)
        across = None if self.across is None else self.across.attending(source.across, mask)
        return replace(self, mask=mask, n_k=source.n_k, _layout=layout, across=across, _schedules={})

    def positions(self, *, of: str = "queries", device: torch.device | str | None = None) -> Tensor:
        """int64 [tokens of this rank], ascending: their indices among all tokens, as for rotary positions.

        Args:
            of: see `shard`.
            device: of the result; None is the CPU.

        Raises:
            ValueError: as in `shard`.
        """
        return self._rows(of).to("cpu" if device is None else device, copy=True)

    def replicated(self, x: Tensor) -> Tensor:
        """`x`, a tensor that every rank has; its gradient is the sum of those of all ranks, in their order and fp32.

        Without it the gradient of a bias, ALiBi slopes or sinks is that of the queries (with "heads", the heads) of
        this rank, as those of all other parameters of a model are: DistributedDataParallel and fully_shard reduce them.
        Every rank has to call backward.

        Raises:
            ValueError: `x` is no tensor, or this process is none of the ranks.
        """
        groups = self._groups()
        if not isinstance(x, Tensor):
            raise ValueError(f"x must be a Tensor, got {type(x).__name__}")
        for group in groups:
            x = replicated(x, group)
        return x

    def _groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of this rank, one for each dimension of the ranks."""
        return (self._known_group(), *(() if self.across is None else self.across._groups()))

    def _part(self, of: str) -> tuple[Tensor, list[Tensor]]:
        """The tokens that the ranks of `group` have together, and the places among them of those of each."""
        if self.across is None:
            return torch.arange(self._length(of), device="cpu"), self._rows_of_all(of)
        part = self.across._rows(of)
        rows = self._rows_of_all(of)[self.rank % self.across.ranks :: self.across.ranks]
        return part, [torch.searchsorted(part, tokens) for tokens in rows]

    def _known_group(self) -> dist.ProcessGroup:
        if self.group is None:
            raise ValueError("mesh must be a DeviceMesh or a ProcessGroup for a plan that is carried out, got an int")
        return self.group

    def _length(self, of: str) -> int:
        return self.n_q if of == "queries" else self.n_k

    def _rows(self, of: str) -> Tensor:
        self._known_group()
        return self._rows_of_all(of)[self.rank]

    def _rows_of_all(self, of: str) -> list[Tensor]:
        if not isinstance(of, str) or of not in ("queries", "keys"):
            raise ValueError(f"of must be 'queries' or 'keys', got {of!r}")
        return self._tokens["queries" if self.together else of]

    @cached_property
    @torch.inference_mode(False)  # a training step may be the next to use them
    def _tokens(self) -> dict[str, list[Tensor]]:
        owners = {"queries": self._layout.owner_q} | ({} if self.together else {"keys": self._layout.owner_k})
        return {of: [(owner == r).nonzero()[:, 0] for r in range(self.ranks)] for of, owner in owners.items()}

    @cached_property
    def _digest(self) -> int:
        return digest(self.n_q, self.n_k, self.ranks, self.algorithm, self._layout.owner_q, self._layout.owner_k)

    def _schedule(self, mask: Mask, more: tuple, make: Callable[[Visibility], _T]) -> tuple[int, _T]:
        """The digest of a mask, and what `make` makes of it for calls of that kind, once for each mask."""
        tensors = mask.tensors()
        offset = None if "q_offset" in tensors else mask.q_offset
        # What changes with the values of a tensor: its version, or a digest of one of inference mode, which has none.
        states = ((name, id(x), digest(x.cpu()) if x.is_inference() else x._version) for name, x in tensors.items())
        key = (mask.causal, offset, mask.window, more, *states)
        if key not in self._schedules:
            if len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.clear()
            there = on(mask, "cpu")
            fields = there.tensors()
            number = digest(self._digest, mask.causal, offset, mask.window, list(fields), *fields.values())
            with torch.inference_mode(False):  # a training step may be the next to use it
                made = make(Visibility(there, self.n_q, self.n_k))
            self._schedules[key] = number, made, tensors  # which keeps their ids from being those of others
        return self._schedules[key][:2]


def _product(
    mask: Mask | None,
    n: int | tuple[int, int],
    mesh: object,
    algorithm: tuple[str, str],
    layout: str | None,
    most_keys: int | None,
    key_cost: float,
) -> Plan:
    """The plan of two algorithms: tokens are shared as the second has them, and each share by ranks of the first."""
    if algorithm not in (("heads", "gather"), ("heads", "ring")):
        raise ValueError(
            f"algorithm must be ('heads', 'gather') or ('heads', 'ring') where it is two, got {algorithm!r}"
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        got = f"one of {mesh.ndim}" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ValueError(f"mesh must be a DeviceMesh of two dimensions for two algorithms, got {got}")
    group, mine, heads = _group_of(mesh.get_group(0))
    across = plan(
        mask, n, mesh.get_group(1), layout=layout, algorithm=algorithm[1], most_keys=most_keys, key_cost=key_cost
    )

    def shared(owner: Tensor) -> Tensor:
        result = torch.empty_like(owner)
        for line in range(across.ranks):
            for rank, tokens in enumerate((owner == line).nonzero()[:, 0].tensor_split(heads)):
                result[tokens] = rank * across.ranks + line
        return result

    ranks, owner_q = heads * across.ranks, shared(across._layout.owner_q)
    owner_k = owner_q if across.together else shared(across._layout.owner_k)
    visibility = Visibility(on(across.mask, "cpu"), across.n_q, across.n_k)
    result = Layout.of(across.layout, visibility, ranks, owner_q, owner_k)
    rank = mine * across.ranks + across.rank
    return Plan(across.mask, across.n_q, across.n_k, rank, ranks, group, algorithm, result, across)


_NUMBERS = itertools.count()
_PLANS: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


def plan_of_key(key: Tensor) -> Plan:
    """The plan with this `_key`."""
    plan = _PLANS.get(int(key))
    if plan is None:
        raise ValueError("plan must live until the backward of a compiled graph, got one that is gone")
    return plan


def _group_of(mesh: DeviceMesh | dist.ProcessGroup | int) -> tuple[dist.ProcessGroup | None, int | None, int]:
    """The group, the rank of this process in it, and the number of ranks."""
    if is_int(mesh) and mesh > 0:
        return None, None, mesh
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh must have one dimension, as mesh['cp'] has, or two for two algorithms, got {mesh.ndim}"
            )
        mesh = mesh.get_group()
    if not isinstance(mesh, dist.ProcessGroup):
        raise ValueError(f"mesh must be a DeviceMesh, a ProcessGroup or an int, at least 1, got {mesh!r}")
    rank = dist.get_rank(mesh)
    if rank < 0:
        raise ValueError(f"mesh must have rank {dist.get_rank()}, which makes the plan, among its ranks")
    return mesh, rank, dist.get_world_size(mesh)


def _check_tokens(name: str, x: Tensor, dim: int, n: int, where: str = "") -> None:
    """Raises ValueError where `x` is no tensor with n entries along `dim`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a Tensor, got {type(x).__name__}")
    if not is_int(dim) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of {name}, got {dim!r}")
    if x.shape[dim] != n:
        raise ValueError(f"{name} must have {n} entries along dim {dim}{where}, got {list(x.shape)}")


def _check_fit(mask: Mask, n_q: int, n_k: int) -> None:
    """Raises ValueError where `mask` is none, or is of other lengths."""
    B, H, device = 1, 1, torch.device("cpu")
    if isinstance(mask, Mask):
        for name, x in mask.tensors().items():
            device = x.device
            B = max(B, x.shape[0] if name != "dense" or x.dim() == 4 else 1)
        H = 1 if mask.dense is None or mask.dense.dim() < 3 else mask.dense.shape[-3]
    q, k = (torch.empty(B, H, 1, 1, device=device).expand(-1, -1, n, -1) for n in (n_q, n_k))
    validated(q, k, k, mask, 1.0, None, None, None, None, 0.0, None, True)

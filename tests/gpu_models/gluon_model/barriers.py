"""mbarriers, as PTX defines them, the hardware's named barriers, and the fence between the two proxies."""

from __future__ import annotations

from .errors import KernelError, source_line
from .machine import Partition, machine
from .protocol import Arrive, Await, Come, Wait
from .shared import View
from .values import value_of


class MBarrier:
    """A phase is complete once `count` arrivals and all bytes that were expected have come; the next one begins then.

    known, fenced: what those know who find a phase complete.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.pending = name, count, count
        self.bytes = 0  # still to come
        self.phase = 0  # the one that is not complete
        self.known = self.fenced = 0
        self._known_of_phase = self._fenced_of_phase = 0

    def __str__(self) -> str:
        return self.name

    def state(self) -> str:
        return f"phase {self.phase}, {self.pending} of {self.count} arrivals and {self.bytes} bytes to come"

    def arrive(self, count: int, known: int, fenced: int) -> None:
        if count > self.pending:
            raise KernelError(f"{count} arrivals at {self}, which waits for {self.pending}, at {source_line()}")
        self.pending -= count
        self._hear(known, fenced)

    def expect(self, count: int) -> None:
        self.bytes += count

    def complete(self, count: int, known: int) -> None:
        """`count` bytes have come."""
        self.bytes -= count
        self._hear(known, 0)

    def _hear(self, known: int, fenced: int) -> None:
        self._known_of_phase |= known
        self._fenced_of_phase |= fenced
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.known |= self._known_of_phase
            self.fenced |= self._fenced_of_phase
            self._known_of_phase = self._fenced_of_phase = 0

    def passed(self, parity: int) -> bool:
        """Whether a wait for that parity ends: it does unless the phase of that parity is the incomplete one."""
        return self.phase % 2 != parity

    def check_at_the_end(self) -> None:
        if self.bytes:
            raise KernelError(f"{self} ends with {self.bytes} bytes that were expected or came too many")


def _barrier(view: View) -> MBarrier:
    if view.numel != 1:
        raise KernelError(f"{view} is no single mbarrier, at {source_line()}")
    barrier = view.allocation.barriers.get(view.data.storage_offset())
    if barrier is None:
        raise KernelError(f"{view} is used as an mbarrier without init, at {source_line()}")
    return barrier


class mbarrier:  # noqa: N801  a module of Gluon
    """The operations on mbarriers."""

    class MBarrierLayout:
        """Where an mbarrier lies."""

        def __init__(self, *_: object) -> None: ...

    @staticmethod
    def allocate_mbarrier(batch: int | None = None, two_ctas: bool = False) -> View:
        from .shared import allocate_shared_memory
        from .values import int64

        return allocate_shared_memory(int64, [1] if batch is None else [batch, 1], mbarrier.MBarrierLayout())

    @staticmethod
    def init(bar: View, count: int) -> None:
        if len(machine().partitions) > 1:
            raise KernelError(f"{bar} begins inside of warp_specialize, at {source_line()}")
        if bar.numel != 1:
            raise KernelError(f"{bar} is no single mbarrier, at {source_line()}")
        name = str(bar).removesuffix("[0]") if len(bar.allocation.shape) == bar.name.count("[") else str(bar)
        bar.allocation.barriers[bar.data.storage_offset()] = MBarrier(name, int(count))

    @staticmethod
    def invalidate(bar: View) -> None:
        _barrier(bar).check_at_the_end()

    @staticmethod
    def expect(bar: View, bytes_per_cta: int, pred: object = True) -> None:
        """Arrives once, and adds bytes to those to come."""
        m = machine()
        m.pause()
        if value_of(pred):
            barrier = _barrier(bar)
            m.record(Arrive, barrier, 1, int(bytes_per_cta))
            barrier.expect(int(bytes_per_cta))
            barrier.arrive(1, m.current.known, m.current.fenced)

    @staticmethod
    def arrive(bar: View, *, count: int = 1, pred: object = True) -> None:
        m = machine()
        m.pause()
        if value_of(pred):
            m.record(Arrive, _barrier(bar), int(count))
            _barrier(bar).arrive(int(count), m.current.known, m.current.fenced)

    @staticmethod
    def wait(bar: View, phase: object, pred: object = True, deps: object = ()) -> None:
        """Until the phase of that parity is complete: that which this partition saw last, or the next one it can be."""
        if not value_of(pred):
            return
        m, barrier, parity = machine(), _barrier(bar), int(value_of(phase))
        if parity not in (0, 1):
            raise KernelError(f"phase of {barrier} must be 0 or 1, was {parity}, at {source_line()}")
        me = m.current
        seen = me.phases.get(barrier, -1)
        again = seen % 2 == parity and barrier.phase == seen + 1
        wanted = seen if again else seen + (2 if seen % 2 == parity else 1)
        m.wait_until(
            lambda: barrier.passed(parity),
            lambda: f"waits for phase {wanted} (parity {parity}) of {barrier}: {barrier.state()}",
        )
        if barrier.phase != wanted + 1:
            when = "before it began" if barrier.phase <= wanted else "when later ones were over, too"
            raise KernelError(
                f"{me.name} waits for phase {wanted} (parity {parity}) of {barrier} and passes {when}, "
                f"at {source_line()}: {barrier.state()}"
            )
        me.phases[barrier] = wanted
        m.record(Wait, barrier, wanted)
        me.learn(barrier.known, barrier.fenced)


class _NamedBarrier:
    """One of the hardware's sixteen: it opens when so many threads have come, and is as new then."""

    def __init__(self, number: int, threads: int) -> None:
        self.number = number
        self.threads, self.come, self.opened = threads, 0, 0
        self.known = self.fenced = 0
        self._known_next = self._fenced_next = 0
        self.who: list[str] = []

    def __str__(self) -> str:
        return f"named barrier {self.number}"

    def come_to(self, partition: Partition) -> None:
        machine().record(Come, self, partition.threads, self.opened)
        self.come += partition.threads
        self.who.append(partition.name)
        self._known_next |= partition.known
        self._fenced_next |= partition.fenced
        if self.come == self.threads:
            self.come, self.opened, self.who = 0, self.opened + 1, []
            self.known, self.fenced = self.known | self._known_next, self.fenced | self._fenced_next
            self._known_next = self._fenced_next = 0


def _named(barrier: int, threads: int) -> _NamedBarrier:
    m = machine()
    barrier, threads = int(barrier), int(threads)
    if not 9 <= barrier <= 15:
        raise KernelError(f"ID of a named barrier must be 9 to 15, was {barrier}, at {source_line()}")
    if threads % 32:
        raise KernelError(f"THREADS of a named barrier must be whole warps, was {threads}, at {source_line()}")
    named = m.named_barriers.setdefault(barrier, _NamedBarrier(barrier, threads))
    if named.come == 0:
        named.threads = threads
    if named.threads != threads or named.come + m.current.threads > threads:
        raise KernelError(
            f"{m.current.name} comes with {m.current.threads} of {threads} threads to named barrier {barrier}, "
            f"where {named.who} make {named.come} of {named.threads}, at {source_line()}"
        )
    if m.current.name in named.who:
        raise KernelError(f"{m.current.name} comes twice to named barrier {barrier} of one round, at {source_line()}")
    return named


def sync_named(ID: int, THREADS: int) -> None:
    """Comes to the barrier and waits until THREADS threads have come."""
    m = machine()
    m.pause()
    barrier, me = _named(ID, THREADS), m.current
    opened = barrier.opened
    barrier.come_to(me)
    m.wait_until(
        lambda: barrier.opened > opened,
        lambda: f"waits at {barrier}: {barrier.come} of {barrier.threads} threads have come",
    )
    m.record(Await, barrier, opened + 1)
    me.learn(barrier.known, barrier.fenced)


def arrive_named(ID: int, THREADS: int) -> None:
    """Comes to the barrier without waiting."""
    m = machine()
    m.pause()
    _named(ID, THREADS).come_to(m.current)


def block_barrier() -> None:
    """Between the threads of one partition, which the model never runs apart."""
    machine().pause()


def fence_async_shared(cluster: bool = False) -> None:
    """What this partition knows of is seen by the asynchronous proxy from now on."""
    me = machine().current
    me.fenced |= me.known

"""How an engine uses the ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Layout"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are used; the product of all degrees is the number of ranks.

    Samples are divided by ``replicate`` and ``shard`` alone: ranks that differ in the others work
    on the same samples. Ranks are counted as torch's device meshes count them, ``tensor`` fastest,
    then ``sequence``, ``shard``, ``replicate`` and ``pipeline``. Ranks that have parts of the same
    samples share weights as any others do: an engine shards over ``sharers``.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.data * self.tensor * self.sequence * self.pipeline

    @property
    def data(self) -> int:
        """The data-parallel degree: into how many shares a global batch is cut."""
        return self.replicate * self.shard

    @property
    def sharers(self) -> int:
        """Among how many ranks weights are cut, where they are."""
        return self.shard * self.sequence

    def share(self, rank: int) -> int:
        """Which of the ``data`` shares of a global batch ``rank`` works on."""
        return rank // (self.tensor * self.sequence) % self.data

    def part(self, rank: int) -> int:
        """Which of the ``sequence`` parts of its samples ``rank`` works on."""
        return rank // self.tensor % self.sequence

    @property
    def alike(self) -> int:
        """How many ranks hold the same of the weights: those among which gradients are averaged."""
        return self.ranks // (self.tensor * self.pipeline)

    def cut(self, parts: int, degree: str = "sequence") -> Layout:
        """The same ranks, of which so many neighbours have a part each of the same samples, or by
        another ``degree`` of the same weights; as it is where the ranks do not come in such
        groups."""
        name = "shard" if self.shard > 1 else "replicate"
        groups, rest = divmod(getattr(self, name), parts)
        if rest:
            return self
        return replace(self, **{name: groups, degree: getattr(self, degree) * parts})

"""From samples to the ratios that are claimed. Totals over totals throughout; nothing here measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.tools.statistics import Sample, SpeedUp, figures, speed_up


@dataclass(frozen=True, slots=True)
class Best:
    """A peer's fastest setting on one set of prompts.

    Attributes:
        speed: tokens/s of that setting; `ratio` ours over it.
        plain_ratio: our plain decoding over the peer's plain decoding; None if either was not measured.
    """

    name: str
    speed: float
    ratio: float | None
    plain_ratio: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt set, one category, or everything.

    Attributes:
        speed: tokens/s while decoding, by arm.
        tokens: tokens written, by arm: engines whose arithmetic differs may end at different places.
        over_plain: our speculating arm over our plain one, with its interval.
        tokens_per_pass, acceptance: of our speculating arm.
    """

    prompts: int
    speed: dict[str, float]
    tokens: dict[str, int]
    over_plain: float | None
    interval: SpeedUp | None
    tokens_per_pass: float | None
    acceptance: float | None
    peers: dict[str, Best]


def compare(
    samples: Sequence[Sample], sets: Mapping[str, str], *, plain: str, ours: str, arms: Sequence[str]
) -> dict[str, Group]:
    """Groups in this order: everything, each prompt set, each category.

    Args:
        sets: prompt name -> prompt set.
        plain, ours: names of our own arms.
        arms: all names; a peer's arms begin with its name, and its plain one ends in " plain".
    """
    by_set = {name: [s for s in samples if sets[s.prompt] == name] for name in dict.fromkeys(sets.values())}
    by_category: dict[str, list[Sample]] = {}
    for sample in samples:
        by_category.setdefault(sample.category, []).append(sample)
    groups = {
        "overall": list(samples),
        **by_set,
        **{c: some for c, some in by_category.items() if c not in by_set},
    }
    return {name: _group(some, plain, ours, arms) for name, some in groups.items()}


def fastest(samples: Sequence[Sample]) -> list[Sample]:
    """Of repeated answers the fastest of each arm to each prompt: other work can only make them slower."""
    kept: dict[tuple[str, str], Sample] = {}
    for sample in samples:
        before = kept.setdefault((sample.arm, sample.prompt), sample)
        if _pace(sample) < _pace(before):
            kept[sample.arm, sample.prompt] = sample
    return list(kept.values())


def _pace(sample: Sample) -> float:
    return sample.decode_s / max(sample.decode_tokens, 1)


def best_of(speeds: Mapping[str, float], peer: str) -> str | None:
    """The fastest arm of a peer."""
    own = [arm for arm in speeds if arm.split()[0] == peer]
    return max(own, key=lambda arm: speeds[arm], default=None)


def _group(samples: Sequence[Sample], plain: str, ours: str, arms: Sequence[str]) -> Group:
    by_arm = {arm: figures([s for s in samples if s.arm == arm]) for arm in arms}
    speed = {arm: f.decode_tokens_per_s for arm, f in by_arm.items() if f.decode_tokens_per_s is not None}
    accepted = by_arm[ours].acceptance if ours in by_arm else None
    peers = {}
    for peer in dict.fromkeys(arm.split()[0] for arm in arms if arm.split()[0] != ours.split()[0]):
        if (name := best_of(speed, peer)) is not None:
            peers[peer] = Best(
                name, speed[name], _ratio(speed, ours, name), _ratio(speed, plain, f"{peer} plain")
            )
    return Group(
        prompts=len({s.prompt for s in samples}),
        speed=speed,
        tokens={arm: f.completion_tokens for arm, f in by_arm.items()},
        over_plain=_ratio(speed, ours, plain),
        interval=speed_up(samples, plain, ours),
        tokens_per_pass=accepted.mean_acceptance_length if accepted else None,
        acceptance=accepted.acceptance_rate if accepted else None,
        peers=peers,
    )


def _ratio(speed: Mapping[str, float], above: str, below: str) -> float | None:
    return speed[above] / speed[below] if above in speed and below in speed else None

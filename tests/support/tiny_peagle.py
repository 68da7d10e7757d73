"""Random P-EAGLE heads and what their formula makes of them: rows of masks behind the text's last row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from support.tiny_heads import Array, ReferenceHead, TinyHead


@dataclass(frozen=True, kw_only=True)
class TinyPeagle(TinyHead):
    """What a random P-EAGLE head holds.

    Attributes:
        layout: "speculators" or "SpecForge".
        mask: the token in rows of masks.
        depths: tokens it guesses in parallel; None leaves it out of config.json.
    """

    layout: str = "speculators"
    layers: int = 3
    own_embedding: bool = True
    mask: int = 11
    depths: int | None = 5

    def arrays(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.seed + 7)
        state = rng.standard_normal((1, 1, self.width * len(self.taps))).astype(np.float32)
        return {**super().arrays(), "mask_hidden": state}

    def config(self) -> dict[str, Any]:
        made = {"mask_token_id": self.mask, "architectures": ["PEagleDraftModel"]}
        if self.depths is not None:
            made["num_depths"] = self.depths
        if self.layout == "speculators":
            made |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
        return super().config() | made | dict(self.settings)

    def _name(self, name: str) -> str:
        return name.replace("midlayer.", "layers.0.")


class ReferencePeagle(ReferenceHead):
    """A P-EAGLE head by its formula: all rows at once, each seeing those before it."""

    tiny: TinyPeagle

    def chain(
        self, tokens: Sequence[int], states: Sequence[Array], length: int
    ) -> tuple[list[int], list[Array]]:
        masks = np.split(self.weights["mask_hidden"].reshape(-1), len(self.tiny.taps))
        rows = [
            np.concatenate([state, np.tile(mask, (length - 1, 1))])
            for state, mask in zip(states, masks, strict=True)
        ]
        fed = [*tokens[1:], *[self.tiny.mask] * (length - 1)]
        self.known = len(tokens) - 1
        logits, _ = self.rows(fed, self.fused(rows))
        last = logits[len(tokens) - 2 :]
        return [int(self.tiny.kept[row.argmax()]) for row in last], list(last)

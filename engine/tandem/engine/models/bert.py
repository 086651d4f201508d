"""Builder of BERT, which has a pooler before its classifier."""

from __future__ import annotations

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.encoder import ClassificationHead, Encoder, EncoderBuilder


class BertBuilder(EncoderBuilder):
    """Builder of one model."""

    name = "bert"
    unread = ("cls.*", "*pooler.dense.*")

    def head(self) -> ClassificationHead:
        hidden, labels = self.facts.hidden_size, len(self.facts.pooling.labels)
        return ClassificationHead(
            self.in_float32(f"{self.prefix}pooler.dense", hidden),
            self.in_float32("classifier", labels),
        )


def load(facts: ModelFacts, weights: Weights) -> Encoder:
    """Load the model with its weights. Raises a LoadError."""
    return BertBuilder.of(facts, weights).build()

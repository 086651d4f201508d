"""Builder of RoBERTa, whose classification head has its own layer and no pooler."""

from __future__ import annotations

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.encoder import ClassificationHead, Encoder, EncoderBuilder


class RobertaBuilder(EncoderBuilder):
    """Builder of one model, also of XLM-RoBERTa."""

    name = "roberta"
    unread = ("lm_head.*", "*pooler.dense.*")

    def head(self) -> ClassificationHead:
        hidden, labels = self.facts.hidden_size, len(self.facts.pooling.labels)
        return ClassificationHead(
            self.in_float32("classifier.dense", hidden),
            self.in_float32("classifier.out_proj", labels),
        )


def load(facts: ModelFacts, weights: Weights) -> Encoder:
    """Load the model with its weights. Raises a LoadError."""
    return RobertaBuilder.of(facts, weights).build()

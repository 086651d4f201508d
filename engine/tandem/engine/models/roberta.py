"""RoBERTa's own: a classification head with a layer of its own, and no pooler."""

from __future__ import annotations

from tandem.engine.config import ModelFacts
from tandem.engine.loader import Weights
from tandem.engine.models.encoder import ClassificationHead, Encoder, EncoderBuilder


class RobertaBuilder(EncoderBuilder):
    """Reads one model, XLM-RoBERTa's too."""

    name = "roberta"
    unread = ("lm_head.*", "*pooler.dense.*")

    def head(self) -> ClassificationHead:
        """See EncoderBuilder."""
        hidden, labels = self.facts.hidden_size, len(self.facts.pooling.labels)
        return ClassificationHead(
            self.in_float32("classifier.dense", hidden),
            self.in_float32("classifier.out_proj", labels),
        )


def load(facts: ModelFacts, weights: Weights) -> Encoder:
    """Load the model with its weights. Raises a LoadError."""
    return RobertaBuilder.of(facts, weights).build()

"""Dummy weights: the same for the same seed and name, and harmless to a forward pass."""

import pytest
import torch

from tandem.engine.config import EngineConfig, facts_of
from tandem.engine.loader import DummyWeights, LoadError, open_weights
from tandem.engine.loader.opening import PERIOD

CPU = torch.device("cpu")


def dummies(seed: int = 0, dtype: torch.dtype = torch.float32) -> DummyWeights:
    return DummyWeights(seed, dtype=dtype, device=CPU, progress=False)


def test_values_depend_on_seed_and_name_alone():
    """The order of asking changes nothing; another seed or name changes everything."""
    one, two = dummies(), dummies()
    a, b = one.get("a", (8, 8)), one.get("b", (8, 8))
    assert torch.equal(two.get("b", (8, 8)), b)
    assert torch.equal(two.get("a", (8, 8)), a)
    assert not torch.equal(a, b)
    assert not torch.equal(a, dummies(1).get("a", (8, 8)))


def test_spread_follows_the_inputs():
    """A product with a matrix keeps the size of its input; gains of norms lie near 1."""
    matrix = dummies().get("model.layers.0.mlp.up_proj.weight", (2048, 512))
    assert matrix.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert abs(matrix.mean().item()) < 1e-3
    assert dummies().get("model.norm.weight", (512,)).mean().item() == pytest.approx(1, abs=0.01)
    assert abs(dummies().get("q_proj.bias", (512,)).mean().item()) < 0.01


def test_no_two_rows_of_a_large_matrix_are_equal():
    """Where numbers repeat, they do so out of step with the rows."""
    matrix = dummies(dtype=torch.bfloat16).get("w", (3 * PERIOD // 512, 512))
    assert matrix.float().sum(-1).unique().numel() > matrix.shape[0] * 0.2
    assert len({tuple(row) for row in matrix[:, :8].tolist()}) == matrix.shape[0]


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_small_shapes_work(shape: tuple[int, ...]):
    """Scalars, empty and single-element tensors are tensors too."""
    assert dummies().get("x", shape).shape == shape


def test_shape_must_be_said():
    """No file knows a dummy's shape."""
    with pytest.raises(LoadError, match="x needs its shape"):
        dummies().get("x")


def test_config_asks_for_dummies(tmp_path):
    """Load format dummy needs no weight file, and nothing is left over in the end."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "vocab_size": 32,
        "max_position_embeddings": 64,
    }
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    facts = facts_of({"architectures": ["LlamaForCausalLM"], **sizes, **heads})
    config = EngineConfig.of(tmp_path, facts=facts, load_format="dummy", seed=3, device="cpu")
    with open_weights(config) as weights:
        assert "anything" in weights
        assert torch.equal(weights.get("a", (4,)), dummies(3).get("a", (4,)))
        weights.check_all_used()
        assert list(weights.names()) == ["a"]

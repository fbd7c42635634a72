"""``roll bisect-logprobs``: the operation in which engine and trainer part."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from roll.cli import main
from roll.pipelines.strict import Pair, one_rank, parting
from roll.replay import prompts_of
from tests.support.tiny_runs import load_changed, rlvr_settings


@pytest.mark.long
def test_equal_log_probs_and_rounding(world, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(rlvr_settings(world, tmp_path / "output")))
    assert main(["bisect-logprobs", str(path), "strict_on_policy=true", "--prompts", "2"]) == 0
    assert " 0 log-probs differ" in capsys.readouterr().out
    assert main(["bisect-logprobs", str(path), "--prompts", "2"]) == 1
    assert "they part in layer 0, model.layers.0.self_attn.o_proj (its input: attention" in capsys.readouterr().out


def found_by(pair: Pair, loaded: Any) -> Any:
    """The operation in which the first sample that differs parts."""
    prompts = prompts_of(loaded, 2)
    samples = pair.samples(prompts, 2, 12)
    chosen = next(one for one in samples if one.first_difference is not None)
    return parting(*pair.traces(samples, chosen, prompts, 2, 12))


@pytest.mark.long_rows("model.layers.1.*")
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("model.layers.1.post_attention_layernorm out", "mlp_norm"),
        ("model.layers.1.self_attn.o_proj out", "output"),
        ("model.layers.0.mlp.down_proj out", "down"),
    ],
)
def test_a_changed_operation_is_found(world, tmp_path, operation, name):
    loaded = load_changed(rlvr_settings(world, tmp_path), {"strict_on_policy": True})
    with one_rank():
        pair = Pair(loaded)
        assert all(one.first_difference is None for one in pair.samples(prompts_of(loaded, 2), 2, 12))
        layer: Any = pair.engine._decoder.layers[int(operation.split(".")[2])]  # type: ignore[attr-defined]
        part = getattr(layer, name)
        setattr(layer, name, part * 1.0001 if name == "mlp_norm" else lambda x: part(x) * 1.0001)
        found = found_by(pair, loaded)
    assert found is not None and found.operation == operation


@pytest.mark.parametrize(
    "changes",
    [
        {"actor_train.use_sequence_packing": True},
        {"actor_train.use_prefix_sharing": True},
        {"actor_train.model_args.lora_target": "all-linear"},
        {"actor_train.strategy_args.strategy_name": "fsdp_train"},
    ],
)
def test_layouts_and_trainers(world, tmp_path, changes):
    """Attention is the first operation whose kernels round otherwise, wherever the trainer puts the tokens."""
    loaded = load_changed(rlvr_settings(world, tmp_path), changes)
    with one_rank():
        found = found_by(Pair(loaded), loaded)
    assert found is not None and found.operation == "model.layers.0.self_attn.o_proj in"

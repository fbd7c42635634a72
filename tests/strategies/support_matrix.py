"""Features of each training strategy: the table of docs/backends.md, as data that a test checks.

``python -m tests.strategies.support_matrix`` writes it into the page. A ``yes`` names the test that shows it; a refusal
names the keys that ``roll check`` refuses, or the test in which the strategy itself does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/backends.md"
BEGIN, END = "<!-- support matrix -->", "<!-- end of support matrix -->"
STRATEGIES = ("fsdp2", "fsdp", "deepspeed", "megatron")


@dataclass(frozen=True)
class Yes:
    """Works, and this test shows it: ``file::function`` or ``file::function[case]``, below ``tests/``."""

    test: str
    text: str = "yes"


@dataclass(frozen=True)
class Refused:
    """``roll check`` refuses this key, with these words in its message."""

    key: str
    value: Any
    words: str
    text: str = "not yet"


@dataclass(frozen=True)
class Noted:
    """Accepted, changes nothing, and ``roll check`` says so with these words."""

    key: str
    value: Any
    words: str
    text: str


@dataclass(frozen=True)
class Other:
    """Does not apply, for the reason given."""

    text: str


Cell = Yes | Refused | Noted | Other


@dataclass(frozen=True)
class Feature:
    """A row, with a cell for each of :data:`STRATEGIES`."""

    name: str
    fsdp2: Cell
    fsdp: Cell
    deepspeed: Cell
    megatron: Cell

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(getattr(self, name) for name in STRATEGIES)


GRADIENT = "test_gradient_and_outputs_equal_the_plain_model"


def yes(file: str, name: str, text: str = "yes") -> Yes:
    """A yes by a test of ``tests/strategies``: a function, or a case of the one that compares gradients."""
    return Yes(f"strategies/{file}.py::{name if name.startswith('test_') else f'{GRADIENT}[{name}]'}", text)


def row(name: str, file: str, *cells: Cell | str | tuple[str, str]) -> Feature:
    """The cells of the columns; one that is alone is that of all.

    Args:
        file: that of the tests that cells name, with or without a text.
    """
    found: list[Cell] = [
        cell if isinstance(cell, Cell) else yes(file, *([cell] if isinstance(cell, str) else cell)) for cell in cells
    ]
    return Feature(name, *(found * len(STRATEGIES) if len(found) == 1 else found))


MODEL, OPTIONS = "actor_train.model_args", "actor_train.strategy_args.strategy_config"
NO, NO_CUT, REFUSED = Other("no"), Other("no: data parallel only"), Other("no: refused by name")
EXPERTS = "megatron/test_experts"
NUMBERS = (
    row("gradient, log-probs and entropies are the plain model's", "test_numbers", GRADIENT),
    row("AdamW, clipping and schedule are PyTorch's", "test_numbers", "test_optimizer_steps_equal_plain_adamw"),
    row(
        "Muon (`training_args.optimizer: muon`) is PyTorch's on whole matrices",
        "test_muon",
        "test_three_steps_equal_pytorch_on_whole_matrices",
    ),
    row(
        "bf16 computation, float32 master weights",
        "test_numbers",
        "test_bf16_computes_in_bf16_and_keeps_float32_weights",
    ),
    row("training in fp16, with a loss scale", "test_fp16", "test_a_step_in_fp16_is_near_the_one_in_fp32"),
    row(
        "a gradient that is not finite is dropped and counted",
        "test_numbers",
        "test_a_gradient_that_is_not_finite_is_dropped",
    ),
    row(
        "any micro-batch size",
        "test_numbers",
        *(f"{one}-micro-batch-1" for one in ("fsdp2", "fsdp", "zero2", "megatron")),
    ),
    row(
        "ranks without rows",
        "test_numbers",
        *("fsdp2-one-without-rows", "fsdp-one-without-rows", "zero3-one-without-rows", "megatron-one-without-rows"),
    ),
    row(
        "gradient checkpointing",
        "test_numbers",
        *("fsdp2-packed-shared-prompts-checkpointed", "fsdp-shared-prompts", "zero3-packed", "recomputed-sp"),
    ),
    row("critic (value head)", "test_numbers", "test_value_gradient_equals_the_plain_model"),
    row("`freeze_module_prefix`", "test_numbers", "test_frozen_modules_do_not_change"),
    row(
        "a reference in the trainer's type has its log-probs exactly",
        "test_numbers",
        "test_reference_in_compute_dtype_equals_the_trainer",
    ),
    row(
        "padding removed (`use_remove_padding`)",
        "test_numbers",
        *("fsdp2-dynamic-no-padding", "fsdp-packed", "zero3-packed", "tp2-sp-packed"),
    ),
    row(
        "packing (`use_sequence_packing`)",
        "test_numbers",
        *("fsdp2-packed", "fsdp-packed", "zero3-packed", "dp2-balanced-packs"),
    ),
    row("dynamic batching", "test_numbers", "fsdp2-dynamic-no-padding", "fsdp-dynamic", "zero2-dynamic", "dp2-dynamic"),
    row(
        "shared prompts (`use_prefix_sharing`)",
        "test_numbers",
        *("fsdp2-packed-shared-prompts-checkpointed", "fsdp-shared-prompts", "zero2-shared-prompts"),
        "tp2-pp2-sp-shared-prompts",
    ),
)
LAYOUTS = (
    row(
        "replicas",
        "test_numbers",
        ("fsdp2-hsdp", "of shards (`fsdp_size`)"),
        ("fsdp-hsdp", "of shards (`fsdp_size`)"),
        Other("no: sharded over all ranks"),
        ("tp2-dp2-distributed-optimizer", "yes, the optimizer sharded over them"),
    ),
    row(
        "tensor parallel",
        "test_numbers",
        Refused(f"{OPTIONS}.tp_size", 2, "tensor parallelism", "no: data parallel only"),
        *(NO_CUT, NO_CUT, "tp2-sp-packed"),
    ),
    row("pipeline parallel, also in virtual stages", "test_numbers", NO_CUT, NO_CUT, NO_CUT, "vpp2-tied"),
    row(
        "context parallel",
        "test_numbers",
        ("ulysses-2x2", "`model_args.ulysses_size`"),
        ("ulysses-fsdp-packed", "`model_args.ulysses_size`"),
        Noted(f"{MODEL}.ulysses_size", 2, "is taken as 1", "taken as 1, with a note"),
        "cp2",
    ),
    row(
        "experts over ranks",
        "test_moe",
        *(("qwen3_moe-ep2", "`ep_size`"), NO, NO, yes(EXPERTS, GRADIENT, "`expert_model_parallel_size`")),
    ),
)
EIGHT_BITS = yes("test_adamw_8bit", "test_resumed_equals_uninterrupted_bit_for_bit")
ON_HOST = yes("test_checkpoint", "test_moments_in_host_memory_change_no_bit", "`optimizer_cpu_offload`")
PARTS = "test_no_rank_loads_a_whole_model"
MEMORY = (
    row(
        "each rank reads its own part of the model's files",
        "test_fsdp2_loading",
        *("test_shards_equal_those_of_a_model_loaded_whole", (PARTS, "unit by unit")),
        *((PARTS, "ZeRO-3, module by module"), PARTS),
    ),
    row("MLP layers in tiles (`apply_tiled_mlp`)", "test_numbers", "fsdp2-tiled-mlp", NO, NO, NO),
    row(
        "parameters in host memory during the passes",
        "test_numbers",
        "fsdp2-offload",
        ("test_reference_in_compute_dtype_equals_the_trainer", "forward-only roles"),
        *("zero3-offload-all", NO),
    ),
    row(
        "moments in 8 bits (`training_args.optimizer: adamw_8bit`)",
        "test_numbers",
        *(EIGHT_BITS, EIGHT_BITS),
        Refused("actor_train.training_args.optimizer", "adamw_8bit", "which has adamw, muon", "no"),
        EIGHT_BITS,
    ),
    row("optimizer states in host memory", "test_numbers", ON_HOST, ON_HOST, "zero2-offload", ON_HOST),
    row("states leave between phases", "test_offload", "test_moved_states_change_nothing"),
    row("LoRA", "test_lora", "test_training_equals_plain_peft"),
    row(
        "compiled layers (`model_args.compile`)",
        "test_numbers",
        *("fsdp2-compiled-shared-prompts", "fsdp-compiled", "zero3-compiled"),
        Refused(f"{MODEL}.compile", True, "kernels for Megatron", "no"),
    ),
    row(
        "Liger's kernels (`model_args.use_liger_kernel`)",
        "test_liger",
        *["test_a_step_equals_the_plain_model_s"] * 3,
        Refused(f"{MODEL}.use_liger_kernel", True, "kernels for Megatron", "no"),
    ),
)
RESUMED = "test_resumed_equals_uninterrupted_bit_for_bit"
OTHER_LAYOUT = "test_another_layout_goes_on_from_the_same_state"
STATE = (
    row("resumed = uninterrupted, bit for bit", "test_checkpoint", RESUMED),
    row(
        "checkpoints are written concurrently with training (`async_save_ckpt`)",
        "test_checkpoint",
        *(RESUMED, RESUMED, NO, NO),
    ),
    row("checkpoints load on another number of ranks", "test_checkpoint", OTHER_LAYOUT),
    row(
        "and under other sizes of the same backend",
        "test_checkpoint",
        *(Other("`fsdp_size`, and under FSDP1"), Other("`fsdp_size`, and under FSDP2")),
        *((OTHER_LAYOUT, "any ZeRO stage"), (OTHER_LAYOUT, "any parallel sizes")),
    ),
    row(
        "a checkpoint that holds more or other weights than the role trains is refused by name",
        "test_checkpoint_mismatch",
        "test_nothing_of_a_checkpoint_is_dropped",
    ),
    row("no file of a checkpoint can run code", "test_checkpoint_safety", "test_no_file_of_a_checkpoint_runs_code"),
    row("export as a Hugging Face folder", "test_weights", "test_export_is_a_hugging_face_folder"),
    row("weights to the engines, in buckets", "test_weights", "test_buckets_hold_the_whole_model_once"),
)
BALANCE = ("test_global_balance_loss_equals_float64_on_the_whole_batch", "over the whole batch")
PUBLISHED = "test_an_export_has_the_published_layout"
BOUNDED = "test_experts_travel_in_bounded_buckets"
MOE = (
    row(
        "mixture of experts: Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE",
        "test_moe",
        *[GRADIENT] * 3,
        yes(EXPERTS, GRADIENT, "Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE"),
    ),
    row("mixture of experts: DeepSeek-V3, GLM4-MoE, gpt-oss", "test_moe", GRADIENT, *[REFUSED] * 3),
    row(
        "linear attention, with and without experts: Qwen3-Next, Qwen3.5",
        "test_text_part",
        *([GRADIENT] * 3),
        REFUSED,
    ),
    row(
        "a model of text that is published with a vision tower (Qwen3.5): export in the published form",
        "test_text_part",
        *["test_what_is_written_has_the_published_form"] * 3,
        REFUSED,
    ),
    row(
        "mixture of experts: packed, dynamic, shared prompts",
        "test_moe",
        *[GRADIENT] * 3,
        yes(EXPERTS, "test_layouts_of_rows_change_nothing"),
    ),
    row(
        "mixture of experts: ranks without an expert in common",
        "test_moe",
        *["test_ranks_that_share_no_expert"] * 3,
        yes(EXPERTS, GRADIENT),
    ),
    row(
        "mixture of experts: experts that are modules",
        "test_moe",
        *[REFUSED] * 2,
        *(("test_ranks_that_share_no_expert", "under ZeRO-0"), NO),
    ),
    row(
        "mixture of experts: balance loss",
        "test_moe_balance",
        *[BALANCE] * 3,
        yes(EXPERTS, "test_balance_loss_is_the_mean_over_micro_batches", "Megatron's own"),
    ),
    row("mixture of experts: resumed, also under another layout", "test_checkpoint", OTHER_LAYOUT),
    row(
        "mixture of experts: export in the published layout",
        "test_moe_state",
        *[PUBLISHED] * 3,
        yes(EXPERTS, "test_weights_are_sent_stored_and_exported_for_transformers"),
    ),
    row(
        "mixture of experts: weights to the engines, matrix by matrix",
        "test_sync_matrix",
        "test_experts_travel_as_they_are_stored",
    ),
    row(
        "mixture of experts: gathered a bucket at a time for the engines",
        "test_sync_matrix",
        *(f"{BOUNDED}[{case}]" for case in ("fsdp2", "fsdp", "zero3")),
        Other("ranks hold matrices of single experts"),
    ),
    row(
        "mixture of experts: router replay (R2, R3)",
        "test_router_replay",
        "test_replay_equals_a_plain_model_told_what_to_choose",
    ),
    row("mixture of experts: LoRA, without routers", "test_lora", "test_training_equals_plain_peft"),
)


def with_images(name: str, *cases: str) -> Feature:
    """A row of vision-language models, with a case for each strategy but Megatron, or a test for all three."""
    return row(f"vision-language: {name}", "test_vision", *(cases if len(cases) == 3 else cases * 3), NO)


SHARES = ("fsdp1-moe-shared-prompts", "zero3-moe-shared-prompts")
ONE_RANK = ("fsdp1-text-on-one-rank-packed", "zero3-text-on-one-rank-packed")
VISION = (
    with_images("gradient, log-probs and entropies", "fsdp2-ulysses-packed-qwen2.5", "fsdp1-ulysses", "zero3-videos"),
    with_images("mixture of experts (Qwen3-VL-MoE)", "fsdp2-shared-prompts-packed-moe", *SHARES),
    with_images("images on one rank only", "fsdp2-text-on-one-rank", *ONE_RANK),
    with_images("packed", "fsdp2-shared-prompts-packed-moe", *ONE_RANK),
    with_images("shared prompts", "fsdp2-shared-prompts-packed-moe", *SHARES),
    with_images("videos", "fsdp2-videos-shared-prompts-moe", "fsdp1-videos-qwen2.5", "zero3-videos"),
    row(
        "vision-language: context parallel",
        "test_vision",
        *("fsdp2-ulysses-packed-qwen2.5", "fsdp1-ulysses", NO, NO),
    ),
    with_images("critic", "test_a_critic_reads_images"),
    with_images("frozen tower", "test_a_frozen_tower_costs_nothing"),
    with_images("LoRA on the language model", "test_adapters_are_on_the_language_model"),
    with_images("weights to the engines", "test_weights_arrive_in_an_engine"),
    with_images("export as a Hugging Face folder", "test_export_is_a_folder_of_transformers"),
    Feature(
        "vision-language: images from environments",
        Yes("pipelines/test_vision_run.py::test_a_policy_learns_from_what_an_environment_shows"),
        *[Other("the same batches; not run")] * 2,
        NO,
    ),
    with_images("resumed = uninterrupted", "test_resumed_equals_uninterrupted"),
)
FEATURES = (*NUMBERS, *LAYOUTS, *MEMORY, *STATE, *MOE, *VISION)


def shown(cell: Cell) -> str:
    """The cell's text, linked to the file of the test behind it."""
    return link(cell.text, cell.test) if isinstance(cell, Yes) else cell.text


def link(text: str, test: str) -> str:
    return f"[{text}](../tests/{test.partition('::')[0]})"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| | " + " | ".join(f"`{name}_*`" for name in STRATEGIES) + " |", "|---" * (len(STRATEGIES) + 1) + "|"]
    for row in FEATURES:
        files = {cell.test.partition("::")[0] for cell in row.cells if isinstance(cell, Yes)}
        # A file that every cell names is linked once, by the row's name.
        name, cells = row.name, [shown(cell) for cell in row.cells]
        if len(files) == 1:
            name, cells = link(row.name, files.pop()), [cell.text for cell in row.cells]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Put the table between the page's markers."""
    head, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin and end, f"{PAGE} has no markers"
    PAGE.write_text(f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()

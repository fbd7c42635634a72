"""Features of each training strategy: the table of docs/backends.md, as data that a test checks.

``python -m tests.strategies.support_matrix`` writes it into the page. A ``yes`` names the test that shows it; a refusal
names the keys that ``roll check`` refuses, or the test in which the strategy itself does.
"""

from __future__ import annotations

from collections.abc import Callable
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


def in_file(file: str) -> Callable[..., Yes]:
    """A yes by a test of ``file``: a function, or a case of the one that compares gradients."""

    def yes(name: str, text: str = "yes") -> Yes:
        return Yes(f"{file}::{name if name.startswith('test_') else f'{GRADIENT}[{name}]'}", text)

    return yes


numbers = in_file("strategies/test_numbers.py")
checkpoint = in_file("strategies/test_checkpoint.py")
weights = in_file("strategies/test_weights.py")
lora = in_file("strategies/test_lora.py")


def by_gradient(name: str, *cases: str) -> Feature:
    """A row of cases of the comparison of gradients, in the order of the columns."""
    return Feature(name, *map(numbers, cases))


def everywhere(name: str, cell: Cell) -> Feature:
    return Feature(name, *([cell] * len(STRATEGIES)))


MODEL, OPTIONS = "actor_train.model_args", "actor_train.strategy_args.strategy_config"
NO_CUT = Other("no: data parallel only")
NUMBERS = (
    everywhere("gradient, log-probs and entropies are the plain model's", numbers(GRADIENT)),
    everywhere("AdamW, clipping and schedule are PyTorch's", numbers("test_optimizer_steps_equal_plain_adamw")),
    everywhere(
        "Muon (`training_args.optimizer: muon`) is PyTorch's on whole matrices",
        in_file("strategies/test_muon.py")("test_three_steps_equal_pytorch_on_whole_matrices"),
    ),
    everywhere(
        "bf16 computation, float32 master weights", numbers("test_bf16_computes_in_bf16_and_keeps_float32_weights")
    ),
    everywhere(
        "training in fp16, with a loss scale",
        in_file("strategies/test_fp16.py")("test_a_step_in_fp16_is_near_the_one_in_fp32"),
    ),
    everywhere(
        "a gradient that is not finite is dropped and counted",
        numbers("test_a_gradient_that_is_not_finite_is_dropped"),
    ),
    by_gradient(
        "any micro-batch size",
        "fsdp2-micro-batch-1",
        "fsdp-micro-batch-1",
        "zero2-micro-batch-1",
        "megatron-micro-batch-1",
    ),
    by_gradient(
        "ranks without rows",
        "fsdp2-one-without-rows",
        "fsdp-one-without-rows",
        "zero3-one-without-rows",
        "megatron-one-without-rows",
    ),
    by_gradient(
        "gradient checkpointing", "fsdp2-checkpointed", "fsdp-checkpointed", "zero2-checkpointed", "recomputed-sp"
    ),
    everywhere("critic (value head)", numbers("test_value_model_starts_at_zero_and_learns")),
    everywhere("`freeze_module_prefix`", numbers("test_frozen_modules_do_not_change")),
    everywhere(
        "a reference in the trainer's type has its log-probs exactly",
        numbers("test_reference_in_compute_dtype_equals_the_trainer"),
    ),
)
BATCHES = (
    by_gradient(
        "padding removed (`use_remove_padding`)",
        "fsdp2-no-padding",
        "fsdp-no-padding",
        "zero2-packed",
        "megatron-packed",
    ),
    by_gradient(
        "packing (`use_sequence_packing`)", "fsdp2-packed", "fsdp-packed", "zero2-packed", "dp2-balanced-packs"
    ),
    by_gradient("dynamic batching", "fsdp2-dynamic", "fsdp-dynamic", "zero2-dynamic", "dp2-dynamic"),
    by_gradient(
        "shared prompts (`use_prefix_sharing`)",
        "fsdp2-shared-prompts",
        "fsdp-shared-prompts",
        "zero2-shared-prompts",
        "tp2-pp2-sp-shared-prompts",
    ),
)
LAYOUTS = (
    Feature(
        "replicas",
        numbers("fsdp2-hsdp", "of shards (`fsdp_size`)"),
        numbers("fsdp-hsdp", "of shards (`fsdp_size`)"),
        Other("no: sharded over all ranks"),
        numbers("tp2-dp2-distributed-optimizer", "yes, the optimizer sharded over them"),
    ),
    Feature(
        "tensor parallel",
        Refused(f"{OPTIONS}.tp_size", 2, "tensor parallelism", "no: data parallel only"),
        NO_CUT,
        NO_CUT,
        numbers("tp2"),
    ),
    Feature("pipeline parallel, also in virtual stages", NO_CUT, NO_CUT, NO_CUT, numbers("vpp2-tied")),
    Feature(
        "context parallel",
        numbers("ulysses-padded", "`model_args.ulysses_size`"),
        numbers("ulysses-fsdp-packed", "`model_args.ulysses_size`"),
        Noted(f"{MODEL}.ulysses_size", 2, "is taken as 1", "taken as 1, with a note"),
        numbers("cp2"),
    ),
    Feature(
        "experts over ranks",
        in_file("strategies/test_moe.py")("qwen3_moe-ep2", "`ep_size`"),
        Other("no"),
        Other("no"),
        in_file("strategies/megatron/test_experts.py")(GRADIENT, "`expert_model_parallel_size`"),
    ),
)
EIGHT_BITS = in_file("strategies/test_adamw_8bit.py")("test_resumed_equals_uninterrupted_bit_for_bit")
ON_HOST = checkpoint("test_moments_in_host_memory_change_no_bit", "`optimizer_cpu_offload`")
MEMORY = (
    Feature(
        "each rank reads its own part of the model's files",
        Yes("strategies/test_fsdp2_loading.py::test_shards_equal_those_of_a_model_loaded_whole"),
        Yes("strategies/test_fsdp2_loading.py::test_no_rank_loads_a_whole_model", "unit by unit"),
        Yes("strategies/test_fsdp2_loading.py::test_no_rank_loads_a_whole_model", "ZeRO-3, module by module"),
        Yes("strategies/test_fsdp2_loading.py::test_no_rank_loads_a_whole_model"),
    ),
    Feature(
        "MLP layers in tiles (`apply_tiled_mlp`)", numbers("fsdp2-tiled-mlp"), Other("no"), Other("no"), Other("no")
    ),
    Feature(
        "parameters in host memory during the passes",
        numbers("fsdp2-offload"),
        numbers("test_reference_in_compute_dtype_equals_the_trainer", "forward-only roles"),
        numbers("zero3-offload-all"),
        Other("no"),
    ),
    Feature(
        "moments in 8 bits (`training_args.optimizer: adamw_8bit`)",
        *[EIGHT_BITS] * 2,
        Refused("actor_train.training_args.optimizer", "adamw_8bit", "which has adamw, muon", "no"),
        EIGHT_BITS,
    ),
    Feature(
        "optimizer states in host memory",
        ON_HOST,
        ON_HOST,
        numbers("zero2-offload"),
        ON_HOST,
    ),
    everywhere("states leave between phases", Yes("strategies/test_offload.py::test_moved_states_change_nothing")),
    everywhere("LoRA", lora("test_training_equals_plain_peft")),
    Feature(
        "compiled layers (`model_args.compile`)",
        numbers("fsdp2-compiled"),
        numbers("fsdp-compiled"),
        numbers("zero3-compiled"),
        Refused(f"{MODEL}.compile", True, "kernels for Megatron", "no"),
    ),
    Feature(
        "Liger's kernels (`model_args.use_liger_kernel`)",
        *[in_file("strategies/test_liger.py")("test_a_step_equals_the_plain_model_s")] * 3,
        Refused(f"{MODEL}.use_liger_kernel", True, "kernels for Megatron", "no"),
    ),
)
RESUMED = "test_resumed_equals_uninterrupted_bit_for_bit"
OTHER_LAYOUT = "test_another_layout_goes_on_from_the_same_state"
STATE = (
    everywhere("resumed = uninterrupted, bit for bit", checkpoint(RESUMED)),
    Feature(
        "checkpoints are written concurrently with training (`async_save_ckpt`)",
        checkpoint(RESUMED),
        checkpoint(RESUMED),
        Other("no"),
        Other("no"),
    ),
    everywhere("checkpoints load on another number of ranks", checkpoint(OTHER_LAYOUT)),
    Feature(
        "and under other sizes of the same backend",
        Other("`fsdp_size`, and under FSDP1"),
        Other("`fsdp_size`, and under FSDP2"),
        checkpoint(OTHER_LAYOUT, "any ZeRO stage"),
        checkpoint(OTHER_LAYOUT, "any parallel sizes"),
    ),
    Feature(
        "a checkpoint that holds more or other weights than the role trains is refused by name",
        *[Yes("strategies/test_checkpoint_mismatch.py::test_nothing_of_a_checkpoint_is_dropped")] * 4,
    ),
    Feature(
        "no file of a checkpoint can run code",
        *[Yes("strategies/test_checkpoint_safety.py::test_no_file_of_a_checkpoint_runs_code")] * 4,
    ),
    everywhere("export as a Hugging Face folder", weights("test_export_is_a_hugging_face_folder")),
    everywhere("weights to the engines, in buckets", weights("test_buckets_hold_the_whole_model_once")),
)
moe = in_file("strategies/test_moe.py")
text_part = in_file("strategies/test_text_part.py")
moe_balance = in_file("strategies/test_moe_balance.py")
moe_state = in_file("strategies/test_moe_state.py")
megatron_experts = in_file("strategies/megatron/test_experts.py")
EXACT_BALANCE = "test_global_balance_loss_equals_float64_on_the_whole_batch"
BOUNDED = "test_experts_travel_in_bounded_buckets"
FSDP2_ONLY = Other("no: refused by name")
EXPERTS = (
    Feature(
        "mixture of experts: Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE",
        *[moe(GRADIENT)] * 3,
        megatron_experts(GRADIENT, "Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE"),
    ),
    Feature(
        "mixture of experts: DeepSeek-V3, GLM4-MoE, gpt-oss",
        moe(GRADIENT),
        *[FSDP2_ONLY] * 3,
    ),
    Feature(
        "linear attention, with and without experts: Qwen3-Next, Qwen3.5",
        *[text_part(GRADIENT)] * 3,
        FSDP2_ONLY,
    ),
    Feature(
        "a model of text that is published with a vision tower (Qwen3.5): export in the published form",
        *[text_part("test_what_is_written_has_the_published_form")] * 3,
        FSDP2_ONLY,
    ),
    Feature(
        "mixture of experts: packed, dynamic, shared prompts",
        *[moe(GRADIENT)] * 3,
        megatron_experts("test_layouts_of_rows_change_nothing"),
    ),
    Feature(
        "mixture of experts: ranks without an expert in common",
        *[moe("test_ranks_that_share_no_expert")] * 3,
        megatron_experts(GRADIENT),
    ),
    Feature(
        "mixture of experts: experts that are modules",
        moe("test_separate_experts_need_the_patch", "with `apply_expert_patch`"),
        moe("test_separate_experts_need_the_patch", "with `apply_expert_patch`"),
        moe(GRADIENT),
        Other("no"),
    ),
    Feature(
        "mixture of experts: balance loss",
        moe_balance(EXACT_BALANCE, "over the whole batch"),
        moe_balance(EXACT_BALANCE, "over the whole batch"),
        moe_balance(EXACT_BALANCE, "over the whole batch"),
        megatron_experts("test_balance_loss_is_the_mean_over_micro_batches", "Megatron's own"),
    ),
    Feature(
        "mixture of experts: resumed, also under another layout",
        *[checkpoint(OTHER_LAYOUT)] * 4,
    ),
    Feature(
        "mixture of experts: export in the published layout",
        moe_state("test_an_export_has_the_published_layout"),
        moe_state("test_an_export_has_the_published_layout"),
        moe_state("test_an_export_has_the_published_layout"),
        megatron_experts("test_weights_are_sent_stored_and_exported_for_transformers"),
    ),
    Feature(
        "mixture of experts: weights to the engines, matrix by matrix",
        *[in_file("strategies/test_sync_matrix.py")("test_experts_travel_as_they_are_stored")] * 4,
    ),
    Feature(
        "mixture of experts: gathered a bucket at a time for the engines",
        *[in_file("strategies/test_sync_matrix.py")(f"{BOUNDED}[{case}]") for case in ("fsdp2", "fsdp", "zero3")],
        Other("ranks hold matrices of single experts"),
    ),
    Feature(
        "mixture of experts: self-test at the start",
        moe("test_separate_experts_need_the_patch"),
        moe("test_separate_experts_need_the_patch"),
        moe("test_the_self_test_of_zero3_names_what_is_wrong", "made under ZeRO-3"),
        Other("no"),
    ),
    Feature(
        "mixture of experts: router replay (R2, R3)",
        *[in_file("strategies/test_router_replay.py")("test_replay_equals_a_plain_model_told_what_to_choose")] * 4,
    ),
    Feature(
        "mixture of experts: LoRA, without routers",
        *[lora("test_training_equals_plain_peft")] * 4,
    ),
)

vision = in_file("strategies/test_vision.py")
NO_TOWER = Other("no")


def with_images(name: str, *cases: str) -> Feature:
    """A row of vision-language models, with a case for each strategy but Megatron."""
    return Feature(name, *map(vision, cases), NO_TOWER)


VISION = (
    with_images("vision-language: gradient, log-probs and entropies", "fsdp2-qwen2.5", "fsdp1", "zero3"),
    with_images(
        "vision-language: mixture of experts (Qwen3-VL-MoE)",
        "fsdp2-moe",
        "fsdp1-moe-shared-prompts",
        "zero3-moe-shared-prompts",
    ),
    with_images(
        "vision-language: images on one rank only",
        "fsdp2-text-on-one-rank",
        "fsdp1-text-on-one-rank-packed",
        "zero3-text-on-one-rank-packed",
    ),
    with_images(
        "vision-language: packed", "fsdp2-packed", "fsdp1-text-on-one-rank-packed", "zero3-text-on-one-rank-packed"
    ),
    with_images(
        "vision-language: shared prompts",
        "fsdp2-shared-prompts",
        "fsdp1-moe-shared-prompts",
        "zero3-moe-shared-prompts",
    ),
    with_images("vision-language: videos", "fsdp2-videos", "fsdp1-videos-qwen2.5", "zero3-videos"),
    Feature(
        "vision-language: context parallel",
        vision("fsdp2-ulysses-packed-qwen2.5"),
        vision("fsdp1-ulysses"),
        Other("no"),
        NO_TOWER,
    ),
    with_images("vision-language: critic", *["test_a_critic_reads_images"] * 3),
    with_images("vision-language: frozen tower", *["test_a_frozen_tower_costs_nothing"] * 3),
    with_images("vision-language: LoRA on the language model", *["test_adapters_are_on_the_language_model"] * 3),
    with_images("vision-language: weights to the engines", *["test_weights_arrive_in_an_engine"] * 3),
    with_images("vision-language: export as a Hugging Face folder", *["test_export_is_a_folder_of_transformers"] * 3),
    Feature(
        "vision-language: images from environments",
        in_file("pipelines/test_vision_run.py")("test_a_policy_learns_from_what_an_environment_shows"),
        *[Other("the same batches; not run")] * 2,
        NO_TOWER,
    ),
    with_images(
        "vision-language: resumed = uninterrupted",
        *["test_resumed_equals_uninterrupted"] * 3,
    ),
)
FEATURES = (*NUMBERS, *BATCHES, *LAYOUTS, *MEMORY, *STATE, *EXPERTS, *VISION)


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

"""Teachers' part of advantages, on a batch by hand; and the exact expectations behind it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll.algorithms.kl import KLOptions, kl_estimate
from roll.config.roles import DataArguments, WorkerConfig
from roll.config.run import PolicyRunConfig
from roll.datasets.templates import TemplateChoice
from roll.datasets.types import PromptRow
from roll.methods.base import Ask
from roll.methods.opd import OPD, PROMPT_LENGTHS, TEACHER_PROMPTS, TeacherPrompts, is_off_policy, with_teacher_prompts
from roll.methods.opd_keys import TeacherConfig, teacher_role
from roll.methods.policy import PolicyMethod
from roll.pipelines.model_calls import answers
from roll.pipelines.rlvr.config import RLVRConfig
from roll.pipelines.rlvr.definition import OPDConfig
from roll.protocol import DataProto
from roll.protocol.metrics import Metrics, to_floats
from tests.agents.tiny import make_tokenizer
from tests.pipelines.test_scoring import scored_batch
from tests.support.keys import config_of

TEACHERS = {"teacher": TeacherConfig()}


class Teacher:
    """A cluster of one worker that gives the same log-prob to every token, and keeps what it was asked."""

    dp_size = 1
    role = WorkerConfig()

    def __init__(self, log_prob: float) -> None:
        self.log_prob = log_prob
        self.asked: list[tuple[int, Ask]] = []

    def call(self, method: Any, batch: DataProto, ask: Ask) -> Teacher:
        self.asked.append((len(batch), ask))
        self.answer = DataProto.from_dict({"log_probs": batch.batch["response_mask"] * self.log_prob})
        return self

    def result(self) -> DataProto:
        return self.answer


def undisturbed(teacher: Any, work: Callable[[], Any]) -> Any:
    return work()


def taught(
    batch: DataProto, config: PolicyRunConfig, teachers: dict[str, Any], temperature: float, entered: Any = None
) -> Metrics:
    """The teachers' columns, as the driver has them added."""
    opd, plan = OPD(config), SimpleNamespace(roles={teacher_role(name): None for name in teachers})
    clusters = {teacher_role(name): teacher for name, teacher in teachers.items()}
    for name, teacher in teachers.items():
        teacher.role, teacher.name = config.teacher[name], teacher_role(name)
    residency: Any = SimpleNamespace(bring=lambda needs: None if entered is None else entered.extend(needs))
    asks = opd.asks(plan, temperature)  # type: ignore[arg-type]
    return opd.receive(batch, answers(batch, asks, clusters, residency, undisturbed))


def scored(config: RLVRConfig, teachers: dict[str, Any]) -> tuple[DataProto, dict[str, float]]:
    batch = scored_batch(False)
    metrics = taught(batch, config, teachers, 0.7)
    return batch, to_floats(metrics | PolicyMethod(config, (None, None), 3).credit(batch))


def test_alone_the_advantage_is_minus_the_log_ratio_whatever_the_rewards() -> None:
    """Each token answers for itself."""
    teacher: Any = Teacher(-1.0)
    batch, metrics = scored(config_of(OPDConfig, teacher=TEACHERS, opd_kl_coef=2.0), {"teacher": teacher})
    mask, ratio = batch.batch["response_mask"], (batch.batch["old_log_probs"] + 1.0) * batch.batch["response_mask"]
    torch.testing.assert_close(batch.batch["advantages"], -2.0 * ratio)
    assert metrics["opd/teacher/kl"] == pytest.approx(float(ratio.sum() / mask.sum()))
    assert teacher.asked == [(7, Ask(temperature=0.7))], "at the temperature of sampling"
    assert batch.batch["scores"].unique().numel() > 1, "rewards are there, and measured"


def test_in_addition_to_rewards_it_comes_before_whitening_and_clipping() -> None:
    settings: dict[str, Any] = {"estimator": "grpo", "use_opd": True, "teacher": TEACHERS, "opd_kl_coef": 0.1}
    teachers: Any = {"teacher": Teacher(-1.0)}
    plain = scored_batch(False)
    PolicyMethod(config_of(RLVRConfig, adv_estimator="grpo"), (None, None), 3).credit(plain)
    mixed, _ = scored(config_of(RLVRConfig, **settings), teachers)
    difference = plain.batch["advantages"] - mixed.batch["advantages"]
    torch.testing.assert_close(difference, mixed.batch["teacher_kl"])
    clipped, _ = scored(config_of(RLVRConfig, **settings, advantage_clip=0.05), teachers)
    assert float(clipped.batch["advantages"].abs().max()) == pytest.approx(0.05)


def test_rows_go_to_teachers_by_tag_and_several_add_up() -> None:
    batch = scored_batch(False)
    batch.non_tensor_batch["tag"][:3] = "a"
    sections = {"all": TeacherConfig(), "some": TeacherConfig(tag_included=["a"], opd_kl_coef=0.5)}
    teachers: Any = {"all": Teacher(-1.0), "some": Teacher(-2.0)}
    config = config_of(OPDConfig, teacher=sections)
    entered: list[Any] = []
    taught(batch, config, teachers, 1.0, entered)
    assert entered == list(map(teacher_role, teachers))
    mask, own = batch.batch["response_mask"], batch.batch["old_log_probs"]
    wanted = (own + 1.0) * mask
    wanted[:3] += 0.5 * ((own + 2.0) * mask)[:3]
    torch.testing.assert_close(batch.batch["teacher_kl"], wanted)
    assert teachers["some"].asked == [(3, Ask())]


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [("k1", "nothing"), ("k2", "reverse KL"), ("k3", "forward KL"), ("advantage", "reverse KL")],
)
def test_expected_gradients_of_the_sampled_forms(estimator: str, wanted: str) -> None:
    """Over all tokens that the student might sample: k1 differentiated teaches nothing, k3 the forward KL; minus k1 as
    an advantage teaches the reverse KL."""
    random = torch.Generator().manual_seed(0)
    student = torch.randn(12, generator=random, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(12, generator=random, dtype=torch.float64).log_softmax(-1)
    log_probs = student.log_softmax(-1)
    probs = log_probs.detach().exp()
    if estimator == "advantage":
        expected = (probs * (log_probs.detach() - teacher) * log_probs).sum()
    else:
        expected = (probs * kl_estimate(log_probs[None], teacher[None], KLOptions(estimator=estimator))[0]).sum()
    exact = {
        "nothing": 0.0 * log_probs.sum(),
        "reverse KL": (log_probs.exp() * (log_probs - teacher)).sum(),
        "forward KL": (teacher.exp() * (teacher - log_probs)).sum(),
    }
    found, target = (torch.autograd.grad(value, student, retain_graph=True)[0] for value in (expected, exact[wanted]))
    torch.testing.assert_close(found, target, rtol=1e-9, atol=1e-12)


def said_of(context: list[int]) -> float:
    """A log-prob that depends on every token in front and on the token itself."""
    return -float(sum(place * token for place, token in enumerate(context, 1)) % 17) / 4


class Reader(Teacher):
    """A teacher whose log-probs depend on all that it reads."""

    def call(self, method: Any, batch: DataProto, ask: Ask) -> Teacher:
        tensors = batch.batch
        column = torch.zeros(tensors["input_ids"].shape)
        for row, place in tensors["response_mask"].nonzero().tolist():
            assert bool(tensors["attention_mask"][row, : place + 1].all())
            column[row, place] = said_of(tensors["input_ids"][row, : place + 1].tolist())
        self.answer = DataProto.from_dict({"log_probs": column})
        return self


def test_teachers_read_their_own_prompts_in_front_of_the_same_responses() -> None:
    """Longer and shorter ones than the student's; tokens that count stay where they are, also behind given ones."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 0], [5, 11, 12, 13, 0, 0]])
    attention = ids > 0
    counted = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]]).bool()
    columns = {"input_ids": ids, "attention_mask": attention, "response_mask": counted}
    columns |= {"old_log_probs": torch.zeros(2, 6), "group_ids": torch.arange(2)}
    columns |= {TEACHER_PROMPTS: torch.tensor([[1, 2, 3], [4, -1, -1]]), PROMPT_LENGTHS: torch.tensor([2, 1])}
    batch = DataProto.from_dict(columns, non_tensors={"tag": np.array(["a", "a"], dtype=object)})
    reader: Any = {"teacher": Reader(0.0)}
    taught(batch, config_of(OPDConfig, teacher=TEACHERS), reader, 1.0)
    wanted = torch.zeros(2, 6)
    for row, prompt, own in ((0, [1, 2, 3], 2), (1, [4], 1)):
        for place in counted[row].nonzero()[:, 0].tolist():
            wanted[row, place] = -said_of([*prompt, *ids[row, own : place + 1].tolist()])
    torch.testing.assert_close(batch.batch["teacher_kl"], wanted)
    plain = DataProto.from_dict({name: columns[name] for name in columns if name != TEACHER_PROMPTS})
    assert with_teacher_prompts(plain) is plain


def test_prompts_of_teachers_are_those_of_their_rows_whatever_the_ids() -> None:
    """A user's ids may have an @, and may repeat."""
    data = DataArguments(prompt="prompt")
    templates = TemplateChoice.of_settings(data, "raw", None)
    tokenizer = make_tokenizer()
    prompts = [
        PromptRow(name, "math", "t", [1], "6 + 6 =", "12", {"prompt": "6 + 6 =", "hint": hint})
        for name, hint in (("mail@1", "1"), ("mail@2", "2"), ("mail@2", "12"))
    ]
    found = TeacherPrompts("{prompt} {hint}", data, templates, tokenizer).token_ids(prompts)
    assert found == [tokenizer(f"6 + 6 = {hint}")["input_ids"] for hint in ("1", "2", "12")]


def test_the_share_of_given_responses_is_exact_and_spread() -> None:
    for lmbda in (0.0, 0.25, 0.3, 0.5, 1.0):
        given = [is_off_policy(order, lmbda) for order in range(100)]
        assert sum(given) == round(100 * (1 - lmbda))
        assert all(abs(sum(given[:end]) - end * (1 - lmbda)) < 1 for end in range(1, 101))

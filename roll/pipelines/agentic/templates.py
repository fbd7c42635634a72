"""The chat template of an agentic run. Torch-free, since a template is looked at before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll.agents.chat_ids import ChatTemplate
from roll.agents.images import ChatImages
from roll.config.names import TEMPLATE_ENDINGS
from roll.pipelines.agentic.config import AgenticConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_THINKING = {"qwen3": True, "qwen3_nothink": False}


def chat_template(
    config: AgenticConfig, tokenizer: PreTrainedTokenizerBase, images: ChatImages | None = None
) -> ChatTemplate:
    """The template that the run names, with the variables of ``data_args.chat_template_kwargs``.

    Args:
        images: how the policy sees some; None: a model of text.
    """
    data_args = config.actor_train.data_args
    name = config.global_template or data_args.template
    arguments: dict[str, Any] = dict(data_args.chat_template_kwargs)
    if name == "chatml":
        arguments = {"chat_template": CHATML} | arguments
    elif name is not None and name.endswith(TEMPLATE_ENDINGS):
        from roll.datasets.templates import template_text

        arguments = {"chat_template": template_text(name)} | arguments
    elif name in _THINKING:
        arguments = {"enable_thinking": _THINKING[name]} | arguments
    ends = [token for token in (tokenizer.eos_token_id, *_stops(config)) if token is not None]
    return ChatTemplate(tokenizer, ends, arguments=arguments, images=images)


def policy_images(
    config: AgenticConfig, model_path: str | None, tokenizer: PreTrainedTokenizerBase
) -> ChatImages | None:
    """The policy's view of images, with the pixel limits of ``actor_train.data_args``; None: it is a model of text.

    Raises:
        DataError: a vision-language model whose image processor is of another kind.
    """
    from roll.datasets.images import ImageReader
    from roll.datasets.vision_model import VisionModel

    assert model_path is not None, "the policy has a model"
    model_args = config.actor_train.model_args
    model = ImageReader.of(
        config.actor_train.data_args, VisionModel.load(model_path, tokenizer, model_args.trust_remote_code)
    ).model
    return None if model is None else ChatImages(model)


def _stops(config: AgenticConfig) -> tuple[int, ...]:
    return tuple(config.actor_infer.generating_args.stop_token_ids or ())

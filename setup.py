"""Packaging of hpnlp. Tools are configured in pyproject.toml, tested versions are listed in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read from the source, since importing hpnlp needs the dependencies that are about to be installed.
VERSION = re.search(r'^__version__ = "([^"]+)"', (HERE / "hpnlp/version.py").read_text("utf-8"), re.MULTILINE)[1]
README = HERE / "README.md"

# Address of the repository, such as https://github.com/OWNER/NAME. After a change, `python .ci/notebooks.py` writes it to the
# notebooks and the README.
REPOSITORY = ""

# Lower bounds are the oldest versions that the tests run against.
REQUIRES = [
    "absl-py>=2.5",
    "flax>=0.12.8",
    "grain>=0.2.18",
    "jax>=0.10.2",
    "jaxtyping>=0.3.11",
    "matplotlib>=3.11",
    "ml_collections>=1.1.0",
    "numpy>=2.4",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "rich>=15.0",
    "scipy>=1.17",  # quantiles of Student's distribution; jax needs scipy too
]

# No extra may install TensorFlow, on which hpnlp does not depend.
EXTRAS = {
    "cuda": ["jax[cuda12]>=0.10.2"],
    "cuda13": ["jax[cuda13]>=0.10.2"],
    "tpu": ["jax[tpu]>=0.10.2"],
    # libtpu compiles without a TPU, for `hpnlp plan --depth=tpu`; jax pins the version of libtpu.
    "tpu-aot": ["jax[tpu]>=0.10.2"],
    "faiss": ["faiss-cpu>=1.15"],
    # Needs numpy and protobuf; its own extra for TensorFlow is left out.
    "scann": ["scann>=1.4.2"],
    # `jax.export` writes and reads files with flatbuffers, which jax does not install.
    "export": ["flatbuffers>=25.12"],
    # Writes the files of `hpnlp export --format=onnx`; needs numpy and protobuf only.
    "onnx": ["onnx>=1.23"],
    # Checks the directories that `hpnlp export` writes, and serves them.
    "serve": ["onnx>=1.23", "onnxruntime>=1.23", "tokenizers>=0.23"],
    # PPMd, which reports of byte-level models name beside gzip and xz.
    "compressors": ["pyppmd>=1.3"],
    "hf": ["safetensors>=0.8", "tokenizers>=0.23"],
    "parquet": ["pyarrow>=26"],
    "sklearn": ["scikit-learn>=1.9"],
    "tensorboard": ["tensorboardX>=2.6.5"],
    "wandb": ["wandb>=0.31"],
    # ruff wraps the signatures of the API reference.
    "docs": [
        "mkdocs>=1.6",
        "mkdocs-jupyter>=0.26",
        "mkdocs-material>=9.7",
        "mkdocstrings[python]>=1.0",
        "ruff>=0.17.5",
    ],
    "notebooks": ["ipykernel>=7.4", "nbclient>=0.11", "nbformat>=5.11"],
    # Independent implementations to test against; pinned, so that a failing test means a change in hpnlp.
    # On Linux, PyPI's torch is a CUDA build with several GB of libraries that no test needs. If pip also has PyTorch's
    # index, it prefers the CPU build, whose local version "2.13.0+cpu" sorts higher:
    #     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-all
    "oracles": [
        "faiss-cpu==1.15.1",
        "gensim==4.4.0",
        "mpmath==1.3.0",
        "onnxruntime==1.32.0",
        "qwix==0.1.8",
        'scann==1.4.2; sys_platform == "linux" and platform_machine == "x86_64"',
        "scikit-learn==1.9.1",
        "torch==2.13.0",
        "transformers==5.23.0",
    ],
}
EXTRAS["test"] = [
    "beartype>=0.23",
    "chex>=0.1.92",
    "hypothesis>=6.170",
    "pytest>=9.2",
    "pytest-xdist>=3.8",
    *EXTRAS["compressors"],
    *EXTRAS["export"],
    *EXTRAS["hf"],
    *EXTRAS["parquet"],
    *EXTRAS["tensorboard"],
]
EXTRAS["dev"] = [
    "import-linter>=2.16",
    "pyright[nodejs]>=1.1.414",  # installs node from the package index; otherwise pyright downloads it from elsewhere
    "ruff>=0.17.5",
    *EXTRAS["test"],
    *EXTRAS["docs"],
    *EXTRAS["notebooks"],
    *EXTRAS["onnx"],
    *EXTRAS["oracles"],
    *EXTRAS["wandb"],
]

# Experiments that `--config=lm/bytes` names are read from the package, where there is no checkout. The other directories hold
# scripts for a checkout.
EXPERIMENTS = [
    path.name
    for path in sorted((HERE / "experiments").iterdir())
    if path.is_dir() and path.name not in ("bench", "compression", "results")
]

setup(
    name="hpnlp",
    version=VERSION,
    description="Techniques of high-performance NLP in JAX, side by side, correct, composable and measured",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    url=REPOSITORY,
    author="The hpnlp authors",
    license="Apache-2.0",
    packages=[
        *find_packages(include=["hpnlp", "hpnlp.*"]),
        "hpnlp.experiments",
        *(f"hpnlp.experiments.{name}" for name in EXPERIMENTS),
    ],
    package_dir={"hpnlp.experiments": "experiments"},
    package_data={"hpnlp": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hpnlp = hpnlp.__main__:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

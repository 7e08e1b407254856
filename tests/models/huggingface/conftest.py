"""Intact checkpoints, and copies of them that a test may change."""

import shutil

import pytest

from hpnlp.models.huggingface import convert
from tests.models.huggingface.checkpoints import GPT2, make


@pytest.fixture(scope="session")
def intact(tmp_path_factory):
    """Directory of two intact checkpoints, of which tests damage copies."""
    directory = tmp_path_factory.mktemp("intact")
    convert.save(*make(tied=False), directory / "llama")
    convert.save(*make(**GPT2, mlp="gelu"), directory / "gpt2")
    return directory


@pytest.fixture
def llama(intact, tmp_path):
    return shutil.copytree(intact / "llama", tmp_path / "llama")


@pytest.fixture
def gpt2(intact, tmp_path):
    return shutil.copytree(intact / "gpt2", tmp_path / "gpt2")

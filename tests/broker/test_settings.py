"""Where settings come from: options before the environment before the file before the defaults."""

import re
import tomllib
import warnings

import pytest

from flmarket.broker.settings import Settings
from flmarket.errors import ConfigError


def test_the_first_that_names_it_decides(tmp_path, monkeypatch):
    file = tmp_path / "broker.toml"
    file.write_text('max_streams = 1\nmax_keys_per_party = 2\nrequest_burst = 3\ntrusted_proxies = ["10.0.0.1"]\n')
    monkeypatch.setenv("FLMARKET_MAX_KEYS_PER_PARTY", "5")
    monkeypatch.setenv("FLMARKET_REQUEST_BURST", "6")
    monkeypatch.setenv("FLMARKET_DATA_SETS", "digits, breast-cancer")
    found = Settings.read(file, {"request_burst": "7"})
    assert (found.max_streams, found.max_keys_per_party, found.request_burst) == (1, 5, 7)
    assert found.trusted_proxies == ("10.0.0.1",)
    assert found.data_sets == ("digits", "breast-cancer")
    assert found.max_active_audits == Settings.model_fields["max_active_audits"].default


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_streams = 0", "max_streams"),
        ("max_streams = 'x'", "max_streams"),
        ("max_stream = 3", "--show-settings"),
        ("worker_pause = nan", "worker_pause"),
        ("max_streams = ", "TOML"),
    ],
)
def test_what_is_not_accepted_is_named(tmp_path, text, named):
    (tmp_path / "broker.toml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        Settings.read(tmp_path / "broker.toml", {})


def test_a_password_is_not_shown():
    secret = Settings(database_url="postgresql+psycopg://me:pAss@host/market")
    assert "pAss" not in repr(secret)
    with pytest.raises(ConfigError) as refused:
        Settings.read(None, {"database_url": ["postgresql+psycopg://me:pAss@host/market"]})
    assert "pAss" not in str(refused.value)


SECRETS = ("database_url", "metrics_token", "smtp_password", "oidc_client_secret")


@pytest.mark.parametrize("name", [*SECRETS, "smtp_pasword", "smtp-password", "databse_url"])
@pytest.mark.parametrize("source", ["option", "file", "environment"])
def test_no_error_repeats_what_may_be_a_secret(tmp_path, monkeypatch, name, source):
    """A secret of the wrong type, or under a misspelt name: the name is said, and never the value."""
    file = tmp_path / "broker.toml"
    file.write_text(f'"{name}" = ["hunter2"]' if source == "file" else "")
    given = {name: ["hunter2"]} if source == "option" else {}
    if source == "environment":  # where all are texts, and names that are not known are somebody else's
        monkeypatch.setenv(f"FLMARKET_{name.upper()}", "hunter2")
        given = {"max_streams": 0}
    with pytest.raises(ConfigError) as refused:
        Settings.read(file, given)
    assert (name if source != "environment" else "max_streams") in str(refused.value)
    assert "hunter2" not in f"{refused.value!r} {refused.value} {vars(refused.value)} {refused.value.__context__}"


def test_secrets_are_marked_as_such():
    """Whatever is called a secret, and whatever may hold one, is left out of reprs and errors."""
    named = {name for name in Settings.model_fields if re.search("password|secret|token|url$", name)} - {"public_url"}
    assert named == set(SECRETS)
    assert all(not Settings.model_fields[name].repr for name in named)


def test_the_template_is_the_defaults(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer itself uses what click has deprecated
        from flmarket.cli.app import app
    app(["serve", "--show-settings"], standalone_mode=False)
    values = tomllib.loads(capsys.readouterr().out)
    assert Settings(**values) == Settings()
    assert set(Settings.model_fields) - set(values) == {"data_dir"}  # has no default to write down
    with pytest.raises(ConfigError, match="name=value"):
        app(["serve", "--set", "max_streams"], standalone_mode=False)
    with pytest.raises(ConfigError) as refused:
        app(["serve", "--set", "smtp_password:hunter2"], standalone_mode=False)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match="max_streams"):
        app(["serve", "--set", "max_streams=none"], standalone_mode=False)

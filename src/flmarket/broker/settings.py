"""What an operator can set, in one frozen value; every limit of the service is here.

A setting comes from the first of these that names it: an option of `flmarket serve` (in Python: an argument), the
environment (`FLMARKET_` and its name in capitals), the settings file (TOML), the default below. As texts, lists are
separated by commas.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from flmarket.errors import ConfigError
from flmarket.files import read_toml


def _separated(value: Any) -> Any:
    return tuple(one.strip() for one in value.split(",") if one.strip()) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_separated)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="FLMARKET_", frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True
    )

    database_url: Annotated[str, Field(repr=False)] = "sqlite:///flmarket-broker.db"
    """SQLite by default, `postgresql+psycopg://…` for many users."""
    data_dir: Path | None = None
    """Where data sets are looked for."""
    data_sets: Names = ("breast-cancer", "digits")
    """The only ones that tasks may name: registered, `package.module:load`, or a file of your own, `clinics.toml`."""
    models: Names = ()
    """Models as `package.module:Name` that tasks may ask for beside the registered ones; they run in this process."""
    max_dimension: Count = 1_000_000
    """Parameters of a model at most."""

    metrics_token: Annotated[str, Field(repr=False)] = ""
    """What Prometheus must send to read /metrics (Authorization: Bearer …); open to everybody if empty."""
    currency: Annotated[str, Field(pattern=r"^\w{0,12}$")] = ""
    """What amounts are in, e.g. EUR; set once, for good. Without it pages speak of units."""
    payout_hook: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = ""
    """`package.module:name` of a function that sends a payout (`flmarket.client.wire.Payout`); it runs here."""
    payout_iban: Annotated[str, Field(pattern=r"^([A-Z]{2}[0-9]{2}[A-Z0-9]{11,30})?$")] = ""
    """The account that payouts come from, in files for the bank (ISO 20022)."""
    payout_name: Annotated[str, Field(max_length=70)] = ""
    """Whose account it is; the operator's name if empty."""
    payout_bic: Annotated[str, Field(pattern=r"^([A-Z0-9]{8}([A-Z0-9]{3})?)?$")] = ""
    """The bank's BIC, if it wants one."""
    webhook_allow: Names = ()
    """Hosts, addresses or networks of your own that webhooks may reach, also without TLS; by default none."""
    notice_tries: Count = 16
    """How often a webhook or a mail is tried, ever more slowly (about two days in all), before it is given up."""
    notice_first_rest: Seconds = 5.0
    """How long the second try waits; each further one twice as long, six hours at most."""
    smtp_host: str = ""
    """The mail server; without one no mail is sent."""
    smtp_port: Annotated[int, Field(ge=1, le=65535)] = 587
    """Its port."""
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """How the connection is protected; none only for a server on this machine."""
    smtp_user: str = ""
    """Who signs in to it; nobody if empty."""
    smtp_password: Annotated[str, Field(repr=False)] = ""
    """Better in the environment than in a file."""
    mail_from: str = "flmarket@localhost"
    """The sender of mails."""
    superlink: str = ""
    """A connection in $FLWR_HOME/config.toml; without one, Flower tasks are refused."""
    flower_folder: Path = Path("flmarket-flower")
    """The state of Flower runs; the SuperLink's ServerApps must see it, and the database, as this process does."""
    flower_bid_seconds: Seconds = 60.0
    """How long a Flower round waits for bids."""
    flower_train_seconds: Seconds = 600.0
    """How long a Flower round waits for updates."""
    flower_start_seconds: Seconds = 180.0
    """How long a Flower run may take to begin."""
    flower_lease_seconds: Seconds = 30.0
    """How long a Flower run that says nothing is believed to be at work."""
    flower_tries: Count = 5
    """Flower runs in a row without a settled round, after which a task fails."""

    run_worker: bool = True
    """Whether this process may play tasks; of several, one does."""
    worker_pause: Seconds = 0.2
    """How often the worker looks for something to do."""
    lease_seconds: Seconds = 15.0
    """How long a worker that says nothing keeps others from working."""

    max_body_bytes: Count = 256 * 1024
    """The largest body of a request."""
    requests_per_second: Rate = 100.0
    """Of a party, in the long run."""
    request_burst: Count = 300
    """Of a party, at once."""
    anonymous_requests_per_second: Rate = 50.0
    """Of an address that nobody has signed in from, in the long run."""
    anonymous_burst: Count = 200
    """Of such an address, at once."""
    sign_ins_per_minute: Rate = 30.0
    """Of an address."""
    trusted_proxies: Names = ()
    """Whose word on a client's address (X-Forwarded-For) is taken: addresses or networks. Nobody's by default."""
    heavy_workers: Count = 2
    """Work that takes seconds has threads of its own: so many at once, one for each party."""
    max_heavy_waiting: Annotated[int, Field(ge=0)] = 16
    """How much such work may wait."""
    max_streams: Count = 200
    """Open event streams."""
    max_streams_per_party: Count = 8
    """Open event streams of one party."""
    stream_seconds: Seconds = 3600.0
    """How long an event stream stays open; browsers and the client resume by themselves."""
    stream_poll_seconds: Seconds = 0.3
    """How often an event stream looks for news."""

    public_url: Annotated[str, Field(pattern=r"^(https?://[^/?#]+)?$")] = ""
    """Where people reach the market, e.g. https://market.example.org; single sign-on needs it."""
    oidc_issuer: str = ""
    """An OpenID Connect provider, e.g. https://login.example.org/realms/lab; without one, no single sign-on."""
    oidc_client_id: str = ""
    """What the provider knows this market as."""
    oidc_client_secret: Annotated[str, Field(repr=False)] = ""
    """The secret it gave; better in the environment than in a file."""
    oidc_name: Annotated[str, Field(max_length=40)] = "single sign-on"
    """What the button is called: Sign in with …"""

    session_seconds: Seconds = 12 * 3600.0
    """How long somebody stays signed in."""
    secure_cookies: bool = False
    """Send cookies over HTTPS only; set it when behind a proxy with TLS."""
    idempotency_seconds: Seconds = 24 * 3600.0
    """How long the answer to a write is kept for its repetition."""
    cut_off_seconds: Seconds = 60.0
    """How long a write whose service died keeps its idempotency key; then it can be repeated."""

    dispute_seconds: Seconds = 14 * 86_400.0
    """How long after an award has ended its owner or its buyer may dispute it."""
    max_disputes_per_party: Count = 20
    """Disputes that a party has opened and nobody has decided yet."""
    max_tasks_per_buyer: Count = 100
    """Tasks of a buyer that are under way."""
    max_evaluations_per_buyer: Count = 20
    """Evaluation sets of a buyer's own."""
    max_active_audits: Count = 4
    """Audits of a party that wait or run."""
    max_hooks_per_party: Count = 10
    """Webhooks and mail addresses of a party."""
    max_keys_per_party: Count = 20
    """Valid API keys of a party."""

    @classmethod
    def read(cls, file: Path | None, given: Mapping[str, Any]) -> Self:
        """Options, environment and file together; the first problem becomes a one-line error that names the setting."""
        values = {} if file is None else read_toml(file, "settings file")
        try:
            return cls(**{**values, **EnvSettingsSource(cls)(), **given})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "settings"
            field = cls.model_fields.get(name)  # a name that is not known may be a misspelt secret's
            shown = first["input"] if field is not None and field.repr else "…"
            known = "one of those that `flmarket serve --show-settings` prints"
            accepted = known if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Input should be ")
            raise ConfigError(f"setting {name}", shown, accepted) from None

    @classmethod
    def template(cls) -> str:
        """A settings file with everything in it, as it is by default. TOML writes such values as JSON does."""
        lines = []
        for name, field in cls.model_fields.items():
            lines.append(f"# {field.description}")
            value = json.dumps(field.default, ensure_ascii=False, default=str)
            lines.append(f"{name} = {value}" if field.default is not None else f"# {name} = …")
        return "\n".join(lines)

"""compose.yaml, Dockerfile and chart say what the service understands, and what they start works.

There are no containers here: files are checked against settings, commands and routes, the chart is rendered by a reader
of our own (`charts`), and the commands of compose.yaml are started as processes.
"""

import html
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import charts
import httpx
import pytest
import yaml
from sqlalchemy import make_url

from flmarket import __version__
from flmarket.broker.app import create_app
from flmarket.broker.settings import Settings
from flmarket.errors import FlmarketError
from flmarket.trust import market_words

ROOT = Path(__file__).parents[2]
FILES = ("compose.yaml", "deploy", "pyproject.toml", "README.md", "LICENSE", "constraints.txt")
HOME = "/var/lib/flmarket"
SECRET = re.compile(r"PASSWORD|TOKEN|SECRET")
SECRET_SETTINGS = {name for name, field in Settings.model_fields.items() if not field.repr}
LEAST = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
IN_FULL = {
    "superlink": {"enabled": True, "tlsSecret": "superlink-tls"}, "extraSecret": "more",
    "database": {"url": "postgresql+psycopg://flmarket:pass@pg:5432/market"}, "metrics": {"token": "t0ken"},
    "ingress": {"enabled": True, "host": "market.example.org", "tlsSecret": "web-tls", "className": "nginx"},
}  # fmt: skip


def substituted(text, known):
    """Variables as Compose fills them in: ${NAME:?why} or ${NAME:-default}."""

    def fill(match):
        name, kind, rest = match[1], match[2], match[3]
        if not known.get(name) and kind == ":?":
            raise ValueError(f"{name}: {rest}")
        return known.get(name) or rest

    return re.sub(r"\$\{(\w+)(:[?-])([^}]*)\}", fill, text)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """What the service understands: the options of its commands and the paths it answers."""
    pytest.importorskip("flwr")
    scripts, options = Path(sys.executable).parent, {}
    for command in (["flmarket", "serve"], ["flower-superlink"]):
        plain = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
        called = [sys.executable, "-m", "flmarket", "serve"] if command[0] == "flmarket" else [scripts / command[0]]
        said = subprocess.run([*called, "--help"], capture_output=True, text=True, check=True, env=plain).stdout
        options[command[0]] = set(re.findall(r"--[a-z][a-z-]+", said))
    url = f"sqlite:///{tmp_path_factory.mktemp('described')}/b.db"
    return options, set(create_app(Settings(database_url=url, run_worker=False)).openapi()["paths"])


# --- what can be wrong ------------------------------------------------------------------------------------------------


def problems(root, known):
    """Everything that does not fit, in words; nothing is good news."""
    found, told = [], (root / "compose.yaml").read_text()
    compose = yaml.safe_load(told)
    dockerfile = (root / "deploy" / "Dockerfile").read_text()
    values = yaml.safe_load((root / "deploy" / "chart" / "values.yaml").read_text())
    found += of_compose(compose, known)
    found += of_dockerfile(dockerfile, root)
    chart = yaml.safe_load((root / "deploy" / "chart" / "Chart.yaml").read_text())
    versions = {chart["version"], chart["appVersion"], *re.findall(r"image: flmarket:(\S+)", told)}
    found += [f"version {one}" for one in versions - {__version__}]
    found += [f"default of a secret: {one}" for one in (values["database"]["url"], values["metrics"]["token"]) if one]
    for changes in ({}, IN_FULL, IN_FULL | {"database": {"existingSecret": "db"}, "metrics": {"existingSecret": "m"}}):
        try:
            found += of_chart(charts.documents(root / "deploy" / "chart", changes), changes, dockerfile, known)
        except charts.ChartError as error:
            found.append(str(error))
    return found


def of_settings(environment):
    """Environment variables that the service does not know, or whose values it does not take."""
    ours = {name: value for name, value in environment.items() if name.startswith("FLMARKET_")}
    given = {name.removeprefix("FLMARKET_").lower(): value for name, value in ours.items() if value is not None}
    try:
        Settings.read(None, given)
    except FlmarketError as error:
        yield str(error)
    yield from (f"{name} is not in capitals" for name in ours if name != name.upper())
    foreign = set(environment) - set(ours) - {"PGPASSWORD", "POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD"}
    yield from (f"nobody reads {name}" for name in foreign)


def of_command(command, options):
    """Options that a command does not have."""
    used = {word.partition("=")[0] for word in command if word.startswith("--")}
    yield from (f"{command[0]} has no {one}" for one in used - options.get(command[0], set()))


def option(command, name):
    """The value of an option, in either spelling."""
    at = next((k for k, word in enumerate(command) if word.partition("=")[0] == name), None)
    if at is None:
        return None
    return command[at].partition("=")[2] or command[at + 1]


def of_compose(compose, known):
    options, paths = known
    services, text = compose["services"], yaml.safe_dump(compose)
    for name, service in services.items():
        environment = service.get("environment", {})
        for variable, value in environment.items():
            secret = SECRET.search(variable) or variable.removeprefix("FLMARKET_").lower() in SECRET_SETTINGS
            if secret and not re.fullmatch(r"\$\{\w+:\?[^}]+\}", value) and variable != "FLMARKET_DATABASE_URL":
                yield f"{name}: {variable} has a default"
        if name != "db":
            filled = {key: substituted(one, {"POSTGRES_PASSWORD": "p", "FLMARKET_METRICS_TOKEN": "t"})
                      for key, one in environment.items()}  # fmt: skip
            yield from of_settings(filled)
            yield from of_command(service["command"], options)
            port = option(service["command"], "--port")
            published = [one.rpartition(":")[2] for one in service["ports"]]
            checked = re.findall(r"(?:127\.0\.0\.1:|127\.0\.0\.1', )(\d+)", service["healthcheck"]["test"][-1])
            if not {port} == set(published) == set(checked):
                yield f"{name}: ports {port}, {published}, {checked}"
            if service["image"] != services["broker"]["image"]:
                yield f"{name}: another image"
            mounts = [one.split(":")[1] for one in service["volumes"]]
            words = [*service["command"], *environment.values(), *(one["target"] for one in service.get("configs", ()))]
            used = [path for word in words for path in re.findall(r"/(?:var|etc|home|data)/[\w./-]+", word)]
            yield from (f"{name}: {one} is on no volume" for one in used
                        if not any(one.startswith(f"{mount}/") for mount in mounts))  # fmt: skip
        for volume in service["volumes"]:
            if volume.split(":")[0] not in compose["volumes"]:
                yield f"{name}: no volume {volume}"
        yield from (f"{name} depends on {one}" for one in service.get("depends_on", {}) if one not in services)
    broker, superlink, db = (services[name] for name in ("broker", "superlink", "db"))
    for path in re.findall(r"http://127\.0\.0\.1:\d+(/\w+)", broker["healthcheck"]["test"][-1]):
        if path not in paths:
            yield f"no address {path}"
    if not broker["ports"][0].startswith("127.0.0.1:"):
        yield "the broker is published without TLS"
    url = make_url(broker["environment"]["FLMARKET_DATABASE_URL"])
    if (url.host, url.port, url.password) != ("db", 5432, None):
        yield f"the database's address is {url!r}"
    said = db["environment"]["POSTGRES_USER"], db["environment"]["POSTGRES_DB"]
    asked = option(db["healthcheck"]["test"], "--username"), option(db["healthcheck"]["test"], "--dbname")
    if not said == asked == (url.username, url.database):
        yield f"users and databases: {said}, {asked}, {url.username}, {url.database}"
    passwords = {services[name]["environment"].get("PGPASSWORD") for name in ("broker", "superlink")}
    if passwords != {db["environment"]["POSTGRES_PASSWORD"]}:
        yield "not one password"
    (config,) = broker["configs"]
    yield from of_flower(compose["configs"][config["source"]]["content"], superlink["command"], "superlink")
    if config["target"] != f"{HOME}/flwr/config.toml":
        yield f"the connection is at {config['target']}"
    yield from (f"no variable {one}" for one in re.findall(r"\$\{(\w+)[^:\w]", text))


def of_flower(config, command, host):
    """A connection that leads elsewhere than to the SuperLink that is started."""
    connection = tomllib.loads(config).get("superlink", {}).get("broker", {})
    wanted = {
        "address": f"{host}:{option(command, '--port')}",
        "root-certificates": option(command, "--ssl-ca-certfile"),
    }
    if connection != wanted:
        yield f"the SuperLink's connection is {connection}, not {wanted}"
    yield from (f"the SuperLink lacks {one}" for one in {"--enable-supernode-auth"} - set(command))


def of_dockerfile(text, root):
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M):
        yield from (f"COPY {one}" for one in line.split()[:-1] if not (root / one).exists() and one != "src")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"], "src", "constraints.txt"}
    copied = {one for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M) for one in line.split()[:-1]}
    yield from (f"not copied: {one}" for one in needed - copied)
    for extra in re.search(r"'\.\[([\w,]+)\]'", text)[1].split(","):
        if extra not in project["optional-dependencies"]:
            yield f"no extra {extra}"
    if not {"broker", "flower"} <= set(re.search(r"'\.\[([\w,]+)\]'", text)[1].split(",")):
        yield "the SuperLink's runs need broker and flower"
    if image_environment(text).get("FLWR_HOME") != f"{HOME}/flwr" or f"WORKDIR {HOME}\n" not in text:
        yield "another home"


def image_environment(dockerfile):
    (said,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", dockerfile, re.M)
    return dict(one.partition("=")[::2] for one in shlex.split(said.replace("\\\n", " ")))


def of_chart(documents, changes, dockerfile, known):
    options, paths = known
    by_kind = {}
    for one in documents:
        by_kind.setdefault(one["kind"], {})[one["metadata"]["name"]] = one
    (deployment,) = by_kind["Deployment"].values()
    template, (volume,) = deployment["spec"]["template"], by_kind["PersistentVolumeClaim"]
    pod, labels = template["spec"], template["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for one in pod["containers"] for port in one["ports"]}
    given = {"superlink-tls", "web-tls", "more", "db", "m"}
    for service in by_kind["Service"].values():
        yield from (f"no port {one}" for one in service["spec"]["ports"] if one["targetPort"] not in ports)
        if service["spec"]["selector"] != labels:
            yield "a service selects nothing"
    if deployment["spec"]["selector"]["matchLabels"] != labels:
        yield "the deployment selects nothing"
    if str(pod["securityContext"]["runAsUser"]) != re.search(r"^USER (\d+)$", dockerfile, re.M)[1]:
        yield "another user"
    volumes = {one["name"]: one for one in pod["volumes"]}
    if volumes["state"]["persistentVolumeClaim"]["claimName"] != volume:
        yield "another volume"
    environment = {}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        yield from (f"no volume {name}" for name in mounts.values() if name not in volumes)
        if container.get("securityContext") != LEAST:
            yield f"{container['name']} may do more than it must"
        if container["command"][0] != "sh":
            yield from of_command(container["command"], options)
            port = option(container["command"], "--port")
            if [str(one["containerPort"]) for one in container["ports"]] != [port]:
                yield f"{container['name']} listens on {port}"
        own = {one["name"]: one for one in container.get("ports", ())}
        for probe in (one for name, one in container.items() if name.endswith("Probe")):
            asked = probe.get("httpGet") or probe["tcpSocket"]
            if asked["port"] not in own:
                yield f"{container['name']}: no port {asked['port']}"
            if asked.get("path", "/healthz") not in paths:
                yield f"no address {asked['path']}"
        words = [*container["command"], *(one.get("value", "") for one in container.get("env", ()))]
        used = [path for word in words for path in re.findall(r"/(?:var|etc|home|data)/[\w./-]+", word)]
        yield from (f"{one} is on no volume" for one in used if not any(one.startswith(f"{m}/") for m in mounts))
        for one in container.get("env", ()):
            name, source = one["name"], one.get("valueFrom", {}).get("secretKeyRef")
            environment[name] = one.get("value")
            if source is not None:
                secret = by_kind.get("Secret", {}).get(source["name"])
                if source["name"] not in given and source["key"] not in (secret or {}).get("stringData", {}):
                    yield f"{name}: no secret {source}"
            elif name.removeprefix("FLMARKET_").lower() in SECRET_SETTINGS and not one["value"].startswith("sqlite:"):
                yield f"{name} is written down"
        for one in container.get("envFrom", ()):
            if "configMapRef" in one:
                environment |= by_kind["ConfigMap"][one["configMapRef"]["name"]]["data"]
            elif one["secretRef"]["name"] not in given:
                yield f"no secret {one}"
    yield from of_settings(environment)
    settings = {name.removeprefix("FLMARKET_").lower() for name in environment}
    written = {one for one in settings & SECRET_SETTINGS - {"database_url"} if environment[f"FLMARKET_{one.upper()}"]}
    yield from (f"{one} in a config map" for one in written)
    if changes:
        (superlink,) = (one for one in pod["containers"] if one["name"] == "superlink")
        (config,) = (
            one["data"]["config.toml"] for one in by_kind["ConfigMap"].values() if "config.toml" in one["data"]
        )
        yield from of_flower(config, superlink["command"], "127.0.0.1")
        (rule,) = next(iter(by_kind["Ingress"].values()))["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        if backend["port"]["name"] not in {p["name"] for p in by_kind["Service"][backend["name"]]["spec"]["ports"]}:
            yield f"the ingress leads to {backend}"


# --- tests ------------------------------------------------------------------------------------------------------------


def test_what_is_deployed_is_what_the_service_understands(known):
    assert problems(ROOT, known) == []


CHART = "deploy/chart/templates"
PLANTS = [
    ("compose.yaml", "FLMARKET_METRICS_TOKEN: $", "FLMARKET_METRIC_TOKEN: $"),
    ("compose.yaml", "FLMARKET_SECURE_COOKIES:-true", "FLMARKET_SECURE_COOKIES:-perhaps"),
    ("compose.yaml", ' --port, "8642"]', ' --port, "8643"]'),
    ("compose.yaml", "127.0.0.1:8642/readyz", "127.0.0.1:8641/readyz"),
    ("compose.yaml", "/readyz", "/ready"),
    ("compose.yaml", "127.0.0.1:8642:8642", "8642:8642"),
    ("compose.yaml", "[flmarket, serve, --host,", "[flmarket, serve, --bind,"),
    ("compose.yaml", "--enable-supernode-auth", "--enable-supernode-authentication"),
    ("compose.yaml", "      - --enable-supernode-auth\n", ""),
    ("compose.yaml", "POSTGRES_PASSWORD: ${POSTGRES_PASSWORD:?set it in .env, see docs/deploy.md}",
     "POSTGRES_PASSWORD: x"),
    ("compose.yaml", "${FLMARKET_METRICS_TOKEN:?set it in .env, see docs/deploy.md}",
     "${FLMARKET_METRICS_TOKEN:-metrics}"),
    ("compose.yaml", "flmarket@db:5432/flmarket", "flmarket:hunter2@db:5432/flmarket"),
    ("compose.yaml", "flmarket@db:5432/flmarket", "flmarket@db:5432/market"),
    ("compose.yaml", "FLMARKET_FLOWER_FOLDER: /var/lib/flmarket/flower", "FLMARKET_FLOWER_FOLDER: /var/lib/flower"),
    ("compose.yaml", "state:/var/lib/flmarket", "sate:/var/lib/flmarket"),
    ("compose.yaml", "superlink:8000\"", "superlink:9092\""),
    ("compose.yaml", "image: flmarket:0.1.0", "image: flmarket:0.0.9"),
    ("compose.yaml", "PGPASSWORD:", "PG_PASSWORD:"),
    ("deploy/Dockerfile", "[broker,oidc,flower]", "[broker,oidc]"),
    ("deploy/Dockerfile", "USER 10001", "USER 1000"),
    ("deploy/Dockerfile", "README.md LICENSE", "LICENSE"),
    ("deploy/Dockerfile", "FLWR_HOME=/var/lib/flmarket/flwr", "FLWR_HOME=/root/.flwr"),
    ("deploy/chart/values.yaml", 'secure_cookies: "true"', 'safe_cookies: "true"'),
    ("deploy/chart/values.yaml", 'token: ""', 'token: "prometheus"'),
    ("deploy/chart/values.yaml", 'settings:\n', 'settings:\n  smtp_password: "hunter2"\n'),
    ("deploy/chart/Chart.yaml", 'appVersion: "0.1.0"', 'appVersion: "0.2.0"'),
    (f"{CHART}/broker.yaml", "FLMARKET_SUPERLINK", "FLMARKET_SUPER_LINK"),
    (f"{CHART}/broker.yaml", "readOnlyRootFilesystem: true, ", ""),
    (f"{CHART}/broker.yaml", "path: /readyz", "path: /readyness"),
    (f"{CHART}/broker.yaml", "port: http}, periodSeconds: 10", "port: web}, periodSeconds: 10"),
    (f"{CHART}/broker.yaml", "containerPort: 8642", "containerPort: 8080"),
    (f"{CHART}/broker.yaml", "sqlite:////var/lib/flmarket/", "sqlite:////data/flmarket/"),
    (f"{CHART}/broker.yaml", "{name: tmp, emptyDir: {}}", "{name: temp, emptyDir: {}}"),
    (f"{CHART}/broker.yaml", "{secretKeyRef: {name: {{ .Release.Name }}, key: metrics-token}}",
     "{secretKeyRef: {name: {{ .Release.Name }}, key: token}}"),
    (f"{CHART}/broker.yaml", "valueFrom: {secretKeyRef: {name: {{ .Release.Name }}, key: database-url}}",
     "value: {{ .Values.database.url | quote }}"),
    (f"{CHART}/broker.yaml", ".Values.extraSecret | quote", ".Values.extraSecrets | quote"),
    (f"{CHART}/service.yaml", "targetPort: http", "targetPort: web"),
    (f"{CHART}/ingress.yaml", "port: {name: http}", "port: {name: https}"),
    (f"{CHART}/config.yaml", "127.0.0.1:8000", "127.0.0.1:9093"),
    (f"{CHART}/config.yaml", "$name | upper", "$name | title"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "right", "wrong"), PLANTS)
def test_a_planted_mistake_is_found(tmp_path, known, file, right, wrong):
    for one in FILES:
        source = ROOT / one
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, tmp_path / one)
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong))
    assert problems(tmp_path, known)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ingress": {"enabled": True, "host": "h", "tlsSecret": "t"}}, "metrics"),
        ({"ingress": {"enabled": True, "host": "h"}, "metrics": {"token": "t"}}, "TLS"),
        ({"superlink": {"enabled": True}}, "tlsSecret"),
    ],
)
def test_the_chart_refuses_what_would_not_be_safe(changes, why):
    with pytest.raises(charts.ChartError, match=why):
        charts.documents(ROOT / "deploy" / "chart", changes)


def test_compose_starts_nothing_without_secrets():
    text = (ROOT / "compose.yaml").read_text()
    with pytest.raises(ValueError, match="POSTGRES_PASSWORD: set it"):
        substituted(text, {"FLMARKET_METRICS_TOKEN": "t"})
    with pytest.raises(ValueError, match="FLMARKET_METRICS_TOKEN: set it"):
        substituted(text, {"POSTGRES_PASSWORD": "p", "FLMARKET_METRICS_TOKEN": ""})


# --- the commands of compose.yaml as processes ------------------------------------------------------------------------


@pytest.mark.slow
def test_what_compose_starts_becomes_healthy_and_serves(tmp_path, postgres):
    """Ports, folder and database are others; commands, variables and health checks are those of the file."""
    pytest.importorskip("flwr")
    from flmarket.engines.flower.certificates import server_files
    from flmarket.engines.flower.deployment import free_ports

    port, link = map(str, free_ports(2))
    home, address = tmp_path / "home", f"http://127.0.0.1:{port}"
    secrets = {"POSTGRES_PASSWORD": "p@ss/word", "FLMARKET_METRICS_TOKEN": "t0ken", "FLMARKET_SUPERLINK": "broker"}
    changes = {
        HOME: str(home), "0.0.0.0": "127.0.0.1", "8642": port, "8000": link, "superlink:": "127.0.0.1:",
        "postgresql+psycopg://flmarket@db:5432/flmarket": postgres(tables=False),
    }  # fmt: skip

    def here(text):
        text = substituted(text, secrets)
        for one, other in changes.items():
            text = text.replace(one, other)
        return text

    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    (home / "flwr").mkdir(parents=True)
    (home / "flwr" / "config.toml").write_text(here(compose["configs"]["flower"]["content"]))
    server_files(home / "tls", "superlink", "127.0.0.1")
    image = image_environment((ROOT / "deploy" / "Dockerfile").read_text())
    image["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    around = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}

    def environment(service):
        said = image | compose["services"][service]["environment"]
        return around | {name: here(value) for name, value in said.items()} | {"HOME": str(home)}

    def start(service):
        command = [here(word) for word in compose["services"][service]["command"]]
        command[0] = shutil.which(command[0], path=image["PATH"])
        with (tmp_path / f"{service}.log").open("wb") as log:
            return subprocess.Popen(command, env=environment(service), cwd=home, stdout=log, stderr=subprocess.STDOUT)

    def healthy(service):
        word, *test = (here(word) for word in compose["services"][service]["healthcheck"]["test"])
        assert word == "CMD"
        test[0] = shutil.which(test[0], path=image["PATH"])
        return subprocess.run(test, env=environment(service), capture_output=True, check=False).returncode == 0

    running = {}
    try:
        for service in ("superlink", "broker"):
            running[service] = start(service)
        for service, process in running.items():
            until = time.monotonic() + 120
            while not healthy(service):
                log = (tmp_path / f"{service}.log").read_text()
                assert process.poll() is None, f"{service} ended:\n{log[-2000:]}"
                assert time.monotonic() < until, f"{service} is not healthy:\n{log[-2000:]}"
                time.sleep(0.3)
        (key,) = re.findall(r"flm_[\w-]+", (tmp_path / "broker.log").read_text())
        with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {key}"}, timeout=30) as http:
            made = http.post("/api/v1/operator/parties", json={"role": "owner", "name": "Anna"})
            assert (made.status_code, made.json()["name"]) == (201, "Anna")
            front = http.get("/")
            assert front.status_code == 200
            assert market_words(on_owners_machines=True) in html.unescape(front.text)
            assert http.get("/metrics").status_code == 401
            assert "flmarket_tasks" in http.get("/metrics", headers={"Authorization": "Bearer t0ken"}).text
        flwr = shutil.which("flwr", path=image["PATH"])  # what the broker starts tasks' runs with
        reached = subprocess.run(
            [flwr, "supernode", "list", "broker"],
            env=environment("broker"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert reached.returncode == 0, reached.stdout + reached.stderr
        running["broker"].send_signal(signal.SIGTERM)  # as `docker compose stop` does, which waits ten seconds
        assert running["broker"].wait(10) in (0, -signal.SIGTERM)
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
        for process in running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

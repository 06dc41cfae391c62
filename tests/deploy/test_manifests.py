"""deploy/: manifests follow the published schemas, refer to what exists, and agree with each other."""

import copy
import importlib.metadata
import json
import math
import re
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY, HOST, SECRET, SLICE, Document, containers, faults, of_kind, pod_templates, read, served

from tinsmith.commands.load_settings import load_settings
from tinsmith.plugins.loading import Plugins
from tinsmith.settings.sources import Flag
from tinsmith.testing import TinyShape, write_tiny_model
from tinsmith_workers.launching import KEY, shared_key

ROOT = DEPLOY.parent
HOW_TO = ROOT / "docs" / "how-to" / "run-on-gke.md"
MANIFESTS = pytest.mark.parametrize("path", [SLICE, HOST], ids=lambda path: path.stem)


@MANIFESTS
def test_every_object_follows_its_schema(path: Path) -> None:
    assert {each["metadata"].get("name"): faults(each) for each in read(path) if faults(each)} == {}


def misspell(job: Document) -> None:
    job["template"]["spec"]["paralelism"] = 4


def give_text(job: Document) -> None:
    job["template"]["spec"]["backoffLimit"] = "none"


def forget_the_template(job: Document) -> None:
    del job["template"]


def misspell_in_the_pod(job: Document) -> None:
    job["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["path"] = "/models"


@pytest.mark.parametrize("change", [misspell, give_text, forget_the_template, misspell_in_the_pod])
def test_the_schemas_see_faults(change: Callable[[Document], None]) -> None:
    [jobset] = copy.deepcopy(of_kind(read(SLICE), "JobSet"))
    change(jobset["spec"]["replicatedJobs"][0])
    assert len(faults(jobset)) == 1


def test_an_unknown_failure_policy_is_a_fault() -> None:
    [jobset] = copy.deepcopy(of_kind(read(SLICE), "JobSet"))
    jobset["spec"]["failurePolicy"]["restartStrategy"] = "Slowly"
    assert "'Slowly' is not one of" in faults(jobset)[0]


@MANIFESTS
def test_pods_mount_volumes_that_exist(path: Path) -> None:
    documents = read(path)
    configurations = {each["metadata"]["name"] for each in of_kind(documents, "ConfigMap")}
    for owner, template in pod_templates(documents):
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        claims = {each["metadata"]["name"] for each in owner.get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for each in containers(template) for mount in each["volumeMounts"]}
        assert mounted == {*volumes, *claims}
        assert {each["configMap"]["name"] for each in volumes.values() if "configMap" in each} <= configurations


@MANIFESTS
def test_no_container_runs_as_root_and_each_can_write_to_its_volumes(path: Path) -> None:
    [user, group] = re.findall(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[-1]
    assert int(user) > 0
    for _, template in pod_templates(read(path)):
        context = template["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (int(user), int(group), int(group))
        for each in containers(template):
            assert each["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@MANIFESTS
def test_services_and_claims_lead_somewhere(path: Path) -> None:
    documents = read(path)
    [service], [server] = of_kind(documents, "Service"), of_kind(documents, "StatefulSet")
    template = server["spec"]["template"]
    assert service["spec"]["selector"] == server["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert server["spec"]["serviceName"] == service["metadata"]["name"]
    [container] = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == ports
    assert ports["http"] == served(documents)["server"]["port"]
    classes = {each["metadata"]["name"] for each in of_kind(documents, "StorageClass")}
    [claim] = server["spec"]["volumeClaimTemplates"]
    assert {claim["spec"]["storageClassName"]} == classes if classes else "storageClassName" not in claim["spec"]


@MANIFESTS
def test_the_data_directory_is_on_the_persistent_volume(path: Path) -> None:
    documents = read(path)
    [server] = of_kind(documents, "StatefulSet")
    [container] = server["spec"]["template"]["spec"]["containers"]
    [claim] = server["spec"]["volumeClaimTemplates"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert mounts[served(documents)["server"]["data_dir"]] == claim["metadata"]["name"]


@MANIFESTS
def test_slice_mesh_and_workers_have_the_same_size(path: Path) -> None:
    documents = read(path)
    [model] = served(documents)["models"]
    [(owner, template)] = [
        (owner, template)
        for owner, template in pod_templates(documents)
        if "google.com/tpu" in template["spec"]["containers"][0]["resources"]["limits"]
    ]
    limits, requests = (template["spec"]["containers"][0]["resources"][each] for each in ("limits", "requests"))
    assert limits["google.com/tpu"] == requests["google.com/tpu"]
    hosts = owner.get("parallelism", 1)
    assert owner.get("completions", 1) == hosts == model["backend"].get("nnodes", 1)
    topology = template["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = math.prod(int(side) for side in topology.split("x"))
    assert chips == hosts * limits["google.com/tpu"] == math.prod(model["backend"].get("mesh", {}).values())


def test_workers_look_for_the_engine_where_it_listens() -> None:
    documents = read(SLICE)
    [service], [jobset] = of_kind(documents, "Service"), of_kind(documents, "JobSet")
    [worker] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    host, _, port = worker["args"][worker["args"].index("--coordinator") + 1].partition(":")
    [model] = served(documents)["models"]
    assert host == service["metadata"]["name"]
    assert model["backend"]["control_address"] == f"0.0.0.0:{port}"
    assert int(port) in {each["port"] for each in service["spec"]["ports"]}


@MANIFESTS
def test_every_container_reads_the_model_from_one_bucket(path: Path) -> None:
    """Each host downloaded it, at each start of its pod, to a volume that was too small for a larger one."""
    documents = read(path)
    [model] = served(documents)["models"]
    buckets = set()
    for _, template in pod_templates(documents):
        assert "initContainers" not in template["spec"]
        assert template["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
        assert template["spec"]["serviceAccountName"] in granted()
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        assert not [each for each in volumes.values() if each.get("emptyDir", {}).get("sizeLimit")]
        for each in containers(template):
            [mount] = [m for m in each["volumeMounts"] if model["path"].startswith(m["mountPath"] + "/")]
            assert mount["readOnly"]
            buckets.add(volumes[mount["name"]]["csi"]["volumeAttributes"]["bucketName"])
    assert len(buckets) == 1


def granted() -> list[str]:
    """Return the service accounts that the how-to lets read the bucket."""
    return re.findall(r"/sa/(\w+)\"", HOW_TO.read_text())


def test_the_how_to_fills_in_what_the_manifests_leave_open() -> None:
    """The words in capitals, and where the model lies in the bucket; the cluster is one that kubectl knows."""
    text = HOW_TO.read_text()
    for path in (SLICE, HOST):
        [model] = served(read(path))["models"]
        assert "bucketName: BUCKET," in path.read_text()
        assert f"hf download {model['name']} --local-dir {Path(model['path']).name}" in text
    assert "s#bucketName: BUCKET#" in text
    commands = [
        "gcloud container clusters get-credentials", "roles/artifactregistry.reader", "roles/storage.objectViewer",
        "GcsFuseCsiDriver=ENABLED", "gcloud storage cp --recursive",
    ]  # fmt: skip
    assert [each for each in commands if each not in text] == []


@MANIFESTS
def test_the_configuration_is_valid(path: Path, tmp_path: Path) -> None:
    """With keys as the Secret gives them. The model is another one, as nothing can be downloaded here."""
    write_tiny_model(tmp_path / "model", TinyShape(num_layers=1))
    settings = served(read(path))
    settings["models"][0]["path"] = str(tmp_path / "model")
    file = tmp_path / "tinsmith.yaml"
    file.write_text(yaml.safe_dump(settings))
    environ = {"TINSMITH_SERVER__API_KEYS": '[{"key": "tml-mine", "tenant": "me"}]'}
    loaded = load_settings(Plugins.load(), file=file, environ=environ, flags=[Flag("server.data_dir", str(tmp_path))])
    assert len(loaded.models) == 1


def test_the_how_to_creates_the_secret_that_the_pods_want() -> None:
    """Its lines are run, but for kubectl itself. Keys that pods can do without need not be there."""
    created = executed("kubectl create secret")
    assert created[:4] == ["create", "secret", "generic", SECRET]
    values = dict(word.removeprefix("--from-literal=").split("=", 1) for word in created[4:])
    references = [
        variable["valueFrom"]["secretKeyRef"]
        for path in (SLICE, HOST)
        for _, template in pod_templates(read(path))
        for container in containers(template)
        for variable in container["env"]
        if "valueFrom" in variable
    ]
    assert {each["name"] for each in references} == {SECRET}
    assert {each["key"] for each in references if not each.get("optional")} == values.keys()
    [key] = json.loads(values["api-keys"])
    assert re.fullmatch("tml-[0-9a-f]{32}", key["key"])
    assert re.fullmatch("[0-9a-f]{64}", values["worker-key"])


def executed(start: str) -> Sequence[str]:
    """Run the block of the how-to that has a line with this start. Return the arguments that kubectl got."""
    [block] = [each for each in console_blocks() if any(line.startswith(start) for line in each.splitlines())]
    script = f'kubectl() {{ printf "%s\\0" "$@"; }}\n{block}'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\0").split("\0")


def console_blocks() -> list[str]:
    """Return the commands of each console block."""
    blocks = re.findall(r"^```console\n(.*?)^```$", HOW_TO.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(r"^\$ ", "", block, flags=re.MULTILINE) for block in blocks]


def test_no_example_shows_a_worker_key_that_is_refused() -> None:
    """A literal one, in what is set or said to be. "..." is for the reader to fill in, $ is for the shell."""
    files = [path for place in ("deploy", "docs", "examples") for path in (ROOT / place).rglob("*") if path.is_file()]
    texts = {path: path.read_text(errors="replace") for path in (*files, ROOT / "README.md")}
    shown = [(path, key) for path, text in texts.items() for key in re.findall(rf"{KEY}=([^\s`]+)", text)]
    assert shown
    for path, key in shown:
        if not key.startswith(("...", "$")):
            assert shared_key({KEY: key.strip("\"'")}), path


def test_the_how_to_names_files_and_objects_that_exist() -> None:
    text = HOW_TO.read_text()
    for file in re.findall(r"\b((?:deploy|examples)/[\w./-]+\.\w+)", text):
        assert (ROOT / file).is_file(), file
    names = {each["metadata"]["name"] for path in (SLICE, HOST) for each in read(path)}
    for kind, name in re.findall(r"\s(statefulset|service|jobset)/([\w-]+)", text):
        assert name in names, f"{kind}/{name}"


def test_the_image_is_made_from_what_exists() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / each).exists() for each in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    read = {project["readme"], *project["license-files"], *built["force-include"]}
    assert read <= set(copied), "the build of the package reads them"
    extras = importlib.metadata.metadata("jax").get_all("Provides-Extra") or []
    comment, argument = (line for line in lines if "cuda12" in line), (line for line in lines if "ARG " in line)
    for accelerator in (*re.findall(r"\b(tpu|cuda\d+)\b", next(comment)), next(argument).partition("=")[2]):
        assert accelerator in extras
    [entry] = [line for line in lines if line.startswith("ENTRYPOINT ")]
    assert json.loads(entry.removeprefix("ENTRYPOINT ")) == ["tini", "--", "tinsmith"]


def stages() -> dict[str, str]:
    """Return the instructions of each image by its name."""
    _, *parts = re.split(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("image", "plugins"), [("gpus", {"fsdp", "megatron", "vllm"}), ("jax", {"jax"})])
def test_an_image_installs_what_it_copies_and_runs_as_a_user(image: str, plugins: set[str]) -> None:
    instructions = stages()[image]
    installed = re.findall(r"(\./plugins/(\w+?)_(?:backend|sampler))(?:\[([\w,]+)\])?", instructions)
    assert {plugin for _, plugin, _ in installed} == plugins
    copied = re.findall(r"^COPY (\S+) ", instructions, re.MULTILINE)
    for directory, _, extra in installed:
        project = tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]
        assert not extra or extra in project["optional-dependencies"], f"{directory}[{extra}]"
        assert any(f"{directory}/".startswith(f"./{each}/") for each in copied), directory
    for left_out in re.findall(r"grep -v '\^([\w-]+==)'", instructions):
        assert f"\n{left_out}" in (ROOT / "constraints.txt").read_text(), "it constrains nothing any more"
    assert re.findall(r"^(?:USER|RUN)\b", instructions, re.MULTILINE)[-1] == "USER"


def test_the_pages_build_images_that_there_are() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md")) + (DEPLOY / "Dockerfile").read_text()
    targets = set(re.findall(r"docker build .*--target (\S+)", text))
    assert targets == {"gpus"}
    assert targets < stages().keys()
    assert list(stages())[-1] == "jax", "what is built without a target is what GKE's page builds"

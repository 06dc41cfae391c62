"""Runs the pods of Kubernetes manifests as processes of this machine, and restarts them as a cluster would.

Everything that differs from a cluster:

- **Image.** A container is this environment: the entry point of deploy/Dockerfile without tini.
- **Bucket.** It is a directory with a tiny random model, which all pods read.
- **Model and devices.** They are those of `Substitutes`.
- **Network.** The pods of a StatefulSet have a loopback address of their own, which takes the place of 0.0.0.0 in what
  they read, and of the names of the Services that select them.
- **Files.** Volumes are mounted at other paths, which take the place of those in commands, variables and
  configurations. All pods can read all volumes.
- **Nodes.** There is one, with one host name: requests, limits and node selectors place nothing.

The commands, variables, volumes, probes, restart policies and failure policies are those of the manifests.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from manifests import Document, of_kind
from small_scale import answers, kill, own_address

_POLL_S: Final = 0.1
_ENTRY_POINT: Final = [sys.executable, "-m", "tinsmith"]

Secrets = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Substitutes:
    """What stands for the model and its devices."""

    model_files: Path
    model: Callable[[Document], Document]  # an item of `models` in the configuration -> what is served instead
    chips: Callable[[int], Mapping[str, str]]  # variables of a container that asks for so many
    environment: Mapping[str, str]  # of all containers, besides their own


@dataclass(kw_only=True)
class Pod:
    name: str
    template: Document
    address: str
    environment: Mapping[str, str]  # what controllers and the node add
    claims: Mapping[str, Path]
    starts: int = 0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None


@dataclass(kw_only=True)
class JobSet:
    """A JobSet whose one job fails with the first pod that does."""

    name: str
    pods: Sequence[Pod]
    max_restarts: int
    restarts: int = 0


class LocalCluster:
    """What `kubectl apply` has created, until the block ends."""

    def __init__(
        self, documents: Sequence[Document], secrets: Secrets, directory: Path, substitutes: Substitutes
    ) -> None:
        self._secrets = secrets
        self.directory = directory
        self._substitutes = substitutes
        self._configs = {each["metadata"]["name"]: each["data"] for each in of_kind(documents, "ConfigMap")}
        self._services = of_kind(documents, "Service")
        self.servers = [pod for each in of_kind(documents, "StatefulSet") for pod in self._of_stateful_set(each)]
        self.jobsets = [self._jobset(each) for each in of_kind(documents, "JobSet")]
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._controllers = threading.Thread(target=self._control, name="controllers")

    @property
    def pods(self) -> Mapping[str, Pod]:
        return {pod.name: pod for pod in [*self.servers, *(pod for each in self.jobsets for pod in each.pods)]}

    @contextmanager
    def running(self) -> Iterator[None]:
        for text in (text for files in self._configs.values() for text in files.values()):
            for model in yaml.safe_load(text)["models"]:
                shutil.copytree(self._substitutes.model_files, self.directory / "bucket" / Path(model["path"]).name)
        self._controllers.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._controllers.join()
            for pod in self.pods.values():
                _delete(pod)
        if self._failure is not None:
            raise self._failure

    def kill(self, name: str) -> None:
        """Kill all processes of a pod, as the loss of its node does."""
        process = self.pods[name].process
        assert process is not None
        kill(process)

    def wait_until_ready(self, name: str) -> None:
        """Ask the pod as its readiness probe does, until it answers."""
        pod = self.pods[name]
        [container] = pod.template["spec"]["containers"]
        probe = container["readinessProbe"]["httpGet"]
        [port] = [each["containerPort"] for each in container["ports"] if each["name"] == probe["port"]]
        while not answers(f"http://{pod.address}:{port}{probe['path']}"):
            assert self._failure is None
            self._stopped.wait(_POLL_S)

    def log(self) -> str:
        return "\n".join(
            f"--- {path.stem}\n{path.read_text(errors='replace')}" for path in sorted(self.directory.glob("*.log"))
        )

    # controllers

    def _of_stateful_set(self, document: Document) -> Iterator[Pod]:
        spec = document["spec"]
        for index in range(spec["replicas"]):
            name = f"{document['metadata']['name']}-{index}"
            claims = [each["metadata"]["name"] for each in spec["volumeClaimTemplates"]]
            yield Pod(
                name=name,
                template=spec["template"],
                address=own_address(index),
                environment={"HOSTNAME": name},
                claims={claim: self.directory / "claims" / f"{claim}-{name}" for claim in claims},
            )

    def _jobset(self, document: Document) -> JobSet:
        """The one kind that deploy/ has: one indexed job, which the loss of a pod ends."""
        name, spec = document["metadata"]["name"], document["spec"]
        [replicated] = spec["replicatedJobs"]
        job = replicated["template"]["spec"]
        assert replicated["replicas"] == 1
        assert job["backoffLimit"] == 0
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert spec["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
        names = [f"{name}-{replicated['name']}-0-{index}" for index in range(job["completions"])]
        pods = [
            Pod(
                name=pod,
                template=job["template"],
                address="127.0.0.1",
                environment=_of_indexed_job(index, pod, [f"{each}.{name}" for each in names]),
                claims={},
            )
            for index, pod in enumerate(names)
        ]
        return JobSet(name=name, pods=pods, max_restarts=spec["failurePolicy"]["maxRestarts"])

    def _control(self) -> None:
        try:
            for pod in self.pods.values():
                self._start(pod)
            while not self._stopped.wait(_POLL_S):
                self._restart_what_ended()
        except BaseException as error:  # noqa: BLE001 - raised where the block ends
            self._failure = error

    def _restart_what_ended(self) -> None:
        for server in self.servers:
            if server.ended:
                self._start(server)
        for jobset in self.jobsets:
            if any(pod.ended for pod in jobset.pods):
                assert jobset.restarts < jobset.max_restarts, "the JobSet has failed"
                jobset.restarts += 1
                for pod in jobset.pods:
                    _delete(pod)
                for pod in jobset.pods:
                    self._start(pod)

    # the node

    def _start(self, pod: Pod) -> None:
        pod.starts += 1
        directory = self.directory / f"{pod.name}.{pod.starts}"
        with (self.directory / f"{pod.name}.{pod.starts}.log").open("wb") as log:
            [container] = pod.template["spec"]["containers"]
            command, environment = self._rendered(pod, container, directory)
            pod.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _rendered(self, pod: Pod, container: Document, directory: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command of a container and its environment."""
        mounts = {
            mount["mountPath"]: self._volume(pod, mount, directory) for mount in container.get("volumeMounts", [])
        }
        here = self._localize(pod, mounts)
        for mount in container.get("volumeMounts", []):
            self._fill(pod, mount, mounts[mount["mountPath"]], here)
        variables = {each["name"]: value for each in container["env"] if (value := self._value(each)) is not None}
        command = container.get("command", _ENTRY_POINT) + container.get("args", [])
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            **self._substitutes.environment,
            **(self._substitutes.chips(chips) if (chips := _chips(container)) else {}),
            **pod.environment,
            **{name: here(value) for name, value in variables.items()},
        }
        return [here(word) for word in command], environment

    def _value(self, variable: Document) -> str | None:
        if "value" in variable:
            return str(variable["value"])
        reference = variable["valueFrom"]["secretKeyRef"]
        value = self._secrets[reference["name"]].get(reference["key"])
        assert value is not None or reference.get("optional"), f"the Secret has no {reference['key']}"
        return value

    def _localize(self, pod: Pod, mounts: Mapping[str, Path]) -> Callable[[str], str]:
        """Return what puts the addresses and paths of this machine into a text."""
        places = {rf"(?<![\w/.-]){re.escape(mount)}(?![\w.-])": str(path) for mount, path in mounts.items()}
        for service in self._services:
            [server] = [each for each in self.servers if _selects(service, each)]
            places[rf"\b{re.escape(service['metadata']['name'])}(?=:\d)"] = server.address
        places[re.escape("0.0.0.0")] = pod.address

        def localize(text: str) -> str:
            for pattern, local in places.items():
                text = re.sub(pattern, local, text)
            return text

        return localize

    def _volume(self, pod: Pod, mount: Document, directory: Path) -> Path:
        if "csi" in _volume_of(pod, mount):
            return self.directory / "bucket"
        place = pod.claims.get(mount["name"], directory / mount["name"]) / mount.get("subPath", "")
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _fill(self, pod: Pod, mount: Document, place: Path, here: Callable[[str], str]) -> None:
        volume = _volume_of(pod, mount)
        if "configMap" in volume:
            for name, text in self._configs[volume["configMap"]["name"]].items():
                (place / name).write_text(here(self._configuration(text)), encoding="utf-8")
        else:
            assert mount["name"] in pod.claims or volume.keys() & {"emptyDir", "csi"}

    def _configuration(self, text: str) -> str:
        settings: dict[str, Any] = yaml.safe_load(text)
        settings["models"] = [self._substitutes.model(model) for model in settings["models"]]
        return yaml.safe_dump(settings)


def _volume_of(pod: Pod, mount: Document) -> Document:
    """Return the volume that is mounted; empty if it is a claim."""
    volumes = {each["name"]: each for each in pod.template["spec"]["volumes"]}
    return volumes.get(mount["name"], {})


def _of_indexed_job(index: int, pod: str, hosts: Sequence[str]) -> Mapping[str, str]:
    """What the Job controller gives a pod of an indexed job, and GKE one that asks for chips."""
    return {
        "HOSTNAME": pod,
        "JOB_COMPLETION_INDEX": str(index),
        "TPU_WORKER_ID": str(index),
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
    }


def _chips(container: Document) -> int:
    return int(container.get("resources", {}).get("limits", {}).get("google.com/tpu", 0))


def _selects(service: Document, pod: Pod) -> bool:
    return service["spec"]["selector"].items() <= pod.template["metadata"]["labels"].items()


def _delete(pod: Pod) -> None:
    """End a pod: ask for it, and kill what is left when its grace period is over."""
    if pod.process is None:
        return
    with suppress(ProcessLookupError):
        pod.process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        pod.process.wait(pod.template["spec"]["terminationGracePeriodSeconds"])
    kill(pod.process)
    pod.process.wait()

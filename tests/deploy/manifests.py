"""The manifests of deploy/gke, and the schemas that they must follow."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

DEPLOY = Path(__file__).parents[2] / "deploy"
SLICE = DEPLOY / "gke" / "v6e-4x4.yaml"
HOST = DEPLOY / "gke" / "v6e-one-host.yaml"

SECRET = "tinsmith"
"""The one object that no file describes: docs/how-to/run-on-gke.md creates it."""

Document = dict[str, Any]


def read(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [each for each in documents if each["kind"] == kind]


def faults(document: Document) -> list[str]:
    """Return what the schema of the document's kind does not allow. Fields that it does not know are faults."""
    schemas = json.loads((Path(__file__).parent / "schemas" / "kubernetes.json").read_text(encoding="utf-8"))
    validator = Draft202012Validator({**schemas, "$ref": f"#/$defs/{document['kind']}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def pod_templates(documents: Sequence[Document]) -> Iterator[tuple[Document, Document]]:
    """Yield each pod template with the specification of the StatefulSet or Job that has it."""
    for each in of_kind(documents, "StatefulSet"):
        yield each["spec"], each["spec"]["template"]
    for jobset in of_kind(documents, "JobSet"):
        for job in jobset["spec"]["replicatedJobs"]:
            yield job["template"]["spec"], job["template"]["spec"]["template"]


def containers(template: Document) -> list[Document]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def served(documents: Sequence[Document]) -> Document:
    """Return the configuration of tinsmith."""
    [configuration] = of_kind(documents, "ConfigMap")
    settings: Document = yaml.safe_load(configuration["data"]["tinsmith.yaml"])
    return settings

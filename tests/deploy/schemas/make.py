"""Make kubernetes.json from what the projects publish.

It needs network, and is run by hand:

    pip download --no-deps kubernetes-validate==1.37.0
    curl -LO .../kubernetes-sigs/jobset/v0.12.0/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
    python tests/deploy/schemas/make.py kubernetes_validate-1.37.0-py3-none-any.whl jobset.x-k8s.io_jobsets.yaml

The package holds the schemas of Kubernetes 1.36, in which a field that Kubernetes does not know is an error. JobSet's
is the `openAPIV3Schema` of its custom resource definition. That repeats the schema of a Job, to which the result
refers instead. Descriptions and defaults are left out, and so are the kinds that deploy/ does not use.
"""

import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

KINDS = {
    "ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "Service": "io.k8s.api.core.v1.Service",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "StorageClass": "io.k8s.api.storage.v1.StorageClass",
}
OF_A_JOBSET = {
    "template": "io.k8s.api.batch.v1.JobTemplateSpec",
    "templates": "io.k8s.api.core.v1.PersistentVolumeClaim",
}
DEFINITIONS = "kubernetes_validate/kubernetes-json-schema/v1.36.0-local-strict/_definitions.json"
COMMENT = (
    "From Kubernetes 1.36.0 (kubernetes/kubernetes, by way of kubernetes-validate 1.37.0) and JobSet 0.12.0 "
    "(kubernetes-sigs/jobset), both under the Apache License 2.0. Shortened by make.py."
)

Schema = dict[str, Any]


def main(wheel: str, definition: str) -> None:
    with zipfile.ZipFile(wheel) as package:
        published: Schema = json.loads(package.read(DEFINITIONS))["$defs"]
    jobset = of_jobset(yaml.safe_load(Path(definition).read_text(encoding="utf-8")))
    needed = reachable(published, [*KINDS.values(), *OF_A_JOBSET.values()])
    definitions = {short(name): shortened(schema) for name, schema in needed.items()}
    assert len(definitions) == len(needed), "two definitions have the same last word"
    definitions["JobSet"] = shortened(jobset)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(definitions[name])}" for name in sorted(definitions))
    target = Path(__file__).with_name("kubernetes.json")
    target.write_text(f'{{"$comment": {json.dumps(COMMENT)}, "$defs": {{\n{lines}\n}}}}\n', encoding="utf-8")


def of_jobset(definition: Schema) -> Schema:
    [version] = [each for each in definition["spec"]["versions"] if each["name"] == "v1alpha2"]
    schema: Schema = version["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]
    specification = schema["properties"]["spec"]["properties"]
    job = specification["replicatedJobs"]["items"]["properties"]
    job["template"] = {"$ref": f"#/$defs/{OF_A_JOBSET['template']}"}
    claims = specification["volumeClaimPolicies"]["items"]["properties"]["templates"]
    claims["items"] = {"$ref": f"#/$defs/{OF_A_JOBSET['templates']}"}
    schema["properties"]["metadata"] = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    return closed(schema)


def closed(schema: Any) -> Any:
    """Make unknown fields an error: the API server drops them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping) and "type" in schema:
        result["additionalProperties"] = False
    return result


def reachable(published: Mapping[str, Schema], names: list[str]) -> Mapping[str, Schema]:
    found: dict[str, Schema] = {}
    while names:
        name = names.pop()
        if name not in found:
            found[name] = published[name]
            names += references(published[name])
    return found


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].rpartition("/")[2]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from references(each)


def shortened(schema: Any, *, of_properties: bool = False) -> Any:
    """Leave out what does not validate. The keys of `properties` are names of fields, which may be the same words."""
    if isinstance(schema, list):
        return [shortened(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/{short(value)}"
        if key == "$ref" and not of_properties
        else shortened(value, of_properties=key == "properties" and not of_properties)
        for key, value in schema.items()
        if of_properties or (key not in {"description", "default"} and not key.startswith("x-kubernetes-"))
    }


def short(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[2]


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Checks Kubernetes manifests: schemas, references between them, and what they ask of the daemon.

usage: check_kubernetes.py FOLDER DROPKVD RENDERED      RENDERED: kustomize's output, or an empty file
"""
import copy
import json
import os
import subprocess
import sys
import tempfile

import kubernetes_validate
import yaml

FOLDER, DROPKVD, RENDERED = sys.argv[1:4]
# The oldest that the manifests claim to be for, and the newest that is known.
VERSIONS = ("1.25.0", kubernetes_validate.latest_version())
DRAIN_TIMEOUT_S = 30  # the daemon's default


def documents(path):
    with open(path, encoding="utf-8") as file:
        return [d for d in yaml.safe_load_all(file) if d]


def expect(condition, text):
    if not condition:
        raise SystemExit("kubernetes: " + text)


def is_valid(document, version):
    try:
        kubernetes_validate.validate(document, version, strict=True)
        return True
    except kubernetes_validate.ValidationError as error:
        print("%s/%s: %s: %s" % (document["kind"], document["metadata"]["name"], ".".join(map(str, error.path)), error.message))
        return False


def check_schemas(manifests):
    for version in VERSIONS:
        for document in manifests:
            expect(is_valid(document, version), "not valid for %s" % version)
    # This check can fail: a mistyped field is noticed.
    broken = copy.deepcopy(next(d for d in manifests if d["kind"] == "Deployment"))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    expect(not is_valid(broken, VERSIONS[-1]), "a mistyped field passes")


def check_pod(workload, config_maps, accounts):
    name, template = workload["metadata"]["name"], workload["spec"]["template"]
    pod = template["spec"]
    selector = workload["spec"]["selector"]["matchLabels"].items()
    expect(selector <= template["metadata"]["labels"].items(), "%s: its selector does not match its pods" % name)
    expect(pod["serviceAccountName"] in accounts, "%s: no such service account" % name)
    expect(pod["securityContext"]["runAsNonRoot"], "%s: may run as root" % name)
    volumes = {v["name"]: v for v in pod["volumes"]}
    for container in pod["containers"] + pod.get("initContainers", []):
        mounts = [m["name"] for m in container["volumeMounts"]]
        expect(set(mounts) <= set(volumes), "%s: a mount without a volume" % name)
        expect("limits" in container["resources"] and "requests" in container["resources"], "%s: no resources" % name)
        confined = container["securityContext"]
        expect(confined["capabilities"]["drop"] == ["ALL"] and confined["readOnlyRootFilesystem"] and
               not confined["allowPrivilegeEscalation"], "%s: %s is not confined" % (name, container["name"]))
    used = {m["name"] for c in pod["containers"] + pod.get("initContainers", []) for m in c["volumeMounts"]}
    expect(used == set(volumes), "%s: a volume that nobody mounts" % name)
    for volume in volumes.values():
        if "configMap" in volume:
            expect(any(m.startswith(volume["configMap"]["name"]) for m in config_maps), "%s: no such config map" % name)
        if "secret" in volume:  # its files belong to root; the daemon reads them as a member of fsGroup
            expect(volume["secret"]["defaultMode"] == 0o440, "%s: the daemon refuses tokens of that mode" % name)
            expect(pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"],
                   "%s: the tokens' group is not the daemon's" % name)
    main = pod["containers"][0]
    ports = {p["name"] for p in main["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        expect(main[probe]["httpGet"]["port"] in ports, "%s: %s asks a port that there is not" % (name, probe))
    pause_s = int(main["lifecycle"]["preStop"]["exec"]["command"][1])
    notice_s = main["readinessProbe"]["periodSeconds"] * main["readinessProbe"]["failureThreshold"]
    expect(pause_s >= notice_s, "%s: SIGTERM before anybody has noticed" % name)
    expect(pod["terminationGracePeriodSeconds"] > pause_s + DRAIN_TIMEOUT_S, "%s: killed while draining" % name)


def check_configuration(text, port):
    """The daemon accepts it, and listens where the manifests say."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        for action in ("--check-config", "--print-config"):
            said = subprocess.run([DROPKVD, "--config", file.name, action], text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, check=False)
            expect(said.returncode == 0, said.stdout)
    expect(json.loads(said.stdout)["http"].endswith(":%d" % port), "the daemon listens elsewhere: %s" % said.stdout)


def main():
    names = sorted(f for f in os.listdir(FOLDER) if f.endswith(".yaml") and f != "kustomization.yaml")
    kustomization = documents(os.path.join(FOLDER, "kustomization.yaml"))[0]
    expect(sorted(kustomization["resources"]) == names, "kustomization.yaml lists other files than there are")
    maps = {g["name"]: [f.split("=")[-1] for f in g["files"]] for g in kustomization["configMapGenerator"]}
    rendered = documents(RENDERED)
    manifests = rendered or [d for name in names for d in documents(os.path.join(FOLDER, name))]
    check_schemas(manifests)

    kinds = {kind: [d for d in manifests if d["kind"] == kind] for kind in {d["kind"] for d in manifests}}
    config_maps = [d["metadata"]["name"] for d in kinds.get("ConfigMap", [])] or list(maps)
    accounts = {d["metadata"]["name"] for d in kinds["ServiceAccount"]}
    workloads = kinds["Deployment"] + kinds["DaemonSet"]
    for workload in workloads:
        check_pod(workload, config_maps, accounts)
    for files in maps.values():
        for name in files:
            with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
                check_configuration(file.read(), 8480)

    http = kinds["Deployment"][0]["spec"]["template"]["metadata"]["labels"].items()
    expect(kinds["Service"][0]["spec"]["selector"].items() <= http, "the service selects no pod")
    expect(kinds["PodDisruptionBudget"][0]["spec"]["selector"]["matchLabels"].items() <= http, "the budget is for no pod")
    policy = kinds["NetworkPolicy"][0]["spec"]["podSelector"]["matchLabels"].items()
    for workload in workloads:
        expect(policy <= workload["spec"]["template"]["metadata"]["labels"].items(), "a pod without a network policy")
    print("kubernetes: %d resources valid for %s" % (len(manifests), " and ".join(VERSIONS)))


main()

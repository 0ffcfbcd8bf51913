"""Checks the compose files against the tree: what they mount is there, what they pass is accepted.

usage: check_compose.py FOLDER DROPKVD       FOLDER: deploy/compose

No engine reads them here: that a schema of compose would accept them is not shown by this.
"""
import os
import re
import subprocess
import sys

import yaml

FOLDER, DROPKVD = sys.argv[1:3]


def expect(condition, text):
    if not condition:
        raise SystemExit("compose: " + text)


def load(name):
    with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
        return yaml.safe_load(file)


def dockerfile(build):
    path = os.path.join(FOLDER, build["context"], build["dockerfile"])
    expect(os.path.isfile(path), "%s is not there" % path)
    with open(path, encoding="utf-8") as file:
        return file.read()


def check_volumes(services, declared):
    used = set()
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                expect(os.path.exists(os.path.join(FOLDER, source)), "%s: %s is not there" % (name, source))
            else:
                used.add(source)
    expect(used == set(declared), "volumes %s are used, %s declared" % (sorted(used), sorted(declared)))


def check_daemon(service, text):
    """`service` as it is built from the Dockerfile `text`."""
    user = re.search(r"^USER (\d+):(\d+)$", text, re.M)
    command = service.get("command") or re.findall(r'"([^"]+)"', re.search(r"^CMD (\[.*\])$", text, re.M).group(1))
    said = subprocess.run([DROPKVD, *command, "--check-config"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False)
    expect(said.returncode == 0, "the daemon refuses %s: %s" % (command, said.stdout))
    expect(user.group(2) in command, "the socket's group is not the image's")
    known = set(re.findall(r"^ARG (\w+)", text, re.M))
    expect(set(service["build"].get("args", {})) <= known, "a build argument that the Dockerfile does not know")
    return user.group(2)


def main():
    cpu, gpu = load("compose.yml"), load("compose.gpu.yml")
    services = cpu["services"]
    check_volumes(services, cpu["volumes"])
    text = dockerfile(services["dropkvd"]["build"])
    group = check_daemon(services["dropkvd"], text)
    expect(set(gpu["services"]) <= set(services), "the GPU variant changes a service that there is not")
    check_daemon(gpu["services"]["dropkvd"], dockerfile(gpu["services"]["dropkvd"]["build"]))
    devices = [gpu["services"][s]["deploy"]["resources"]["reservations"]["devices"] for s in ("dropkvd", "vllm")]
    expect(devices[0] == devices[1], "daemon and engine are on different GPUs")
    expect(services["vllm"]["group_add"] == [group], "vLLM is not in the socket's group")
    mounts = [next(v for v in services[s]["volumes"] if v.startswith("run:")) for s in ("dropkvd", "vllm")]
    expect(mounts[0] == mounts[1] == "run:/run/dropkv", "the socket's folder is not shared")
    expect(services["vllm"]["depends_on"]["dropkvd"]["condition"] == "service_healthy" and "HEALTHCHECK" in text,
           "vLLM waits for a health check that there is not")
    print("compose: %d services fit the tree" % len(services))


main()

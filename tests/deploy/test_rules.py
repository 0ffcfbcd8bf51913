"""The Prometheus rules and the Grafana dashboard against a real daemon's metrics, by promtool.

usage: test_rules.py DROPKVD DEPLOY_FOLDER

  - the rules and the scrape configuration are valid, and so is every query of the dashboard
  - every series that they name exists in /metrics of a daemon that has just started
  - a healthy daemon raises no alert; each alert is raised by its fault, and that fault raises no other
  - /metrics itself passes promtool check metrics
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "server"))
from daemon import Daemon  # noqa: E402 (its folder is known only now)

DROPKVD, DEPLOY = (os.path.abspath(path) for path in sys.argv[1:3])
RULES = os.path.join(DEPLOY, "prometheus", "dropkv.rules.yml")
DASHBOARD = os.path.join(DEPLOY, "grafana", "dropkv.json")

WORKER = 'worker="0",device="cuda:0"'

# (metric, labels beside job and instance): values a minute apart, in promtool's notation.
HEALTHY = {
    ("up", ""): "1x40",
    ("process_start_time_seconds", ""): "100x40",
    ("process_open_fds", ""): "20x40",
    ("process_max_fds", ""): "1000x40",
    ("dropkv_ready", ""): "1x40",
    ("dropkv_draining", ""): "0x40",
    ("dropkv_worker_given_up", WORKER): "0x40",
    ("dropkv_worker_fallback", WORKER): "0x40",
    ("dropkv_worker_restarts_total", WORKER): "1x40",
    ("dropkv_queue_age_seconds", 'priority="1"'): "0x40",
    ("dropkv_queue_age_seconds", 'priority="2"'): "0.01x40",
    ("dropkv_queue_requests", ""): "10x40",
    ("dropkv_queue_limit_requests", ""): "256x40",
    ("dropkv_body_bytes", ""): "1000x40",
    ("dropkv_body_limit_bytes", ""): "1000000x40",
    ("dropkv_requests_total", 'outcome="ok"'): "0+600x40",
    ("dropkv_requests_total", 'outcome="invalid"'): "0+6x40",
    ("dropkv_requests_total", 'outcome="busy"'): "0+1x40",
    ("dropkv_requests_total", 'outcome="timeout"'): "0x40",
    ("dropkv_requests_total", 'outcome="failed"'): "0x40",
    ("dropkv_request_seconds_bucket", 'le="0.01"'): "0+600x40",
    ("dropkv_request_seconds_bucket", 'le="1"'): "0+600x40",
    ("dropkv_request_seconds_bucket", 'le="2.5"'): "0+600x40",
    ("dropkv_request_seconds_bucket", 'le="+Inf"'): "0+600x40",
    ("dropkv_degraded_total", ""): "0x40",
    ("dropkv_nonfinite_inputs_total", 'action="refused"'): "0x40",
    ("dropkv_nonfinite_inputs_total", 'action="masked"'): "0x40",
    ("dropkv_http_refused_total", 'reason="auth"'): "0+6x40",
    ("dropkv_config_reloads_total", 'result="ok"'): "0+1x40",
    ("dropkv_config_reloads_total", 'result="failed"'): "0x40",
}

# alert: (minute at which it must be firing, what differs from a healthy daemon)
FAULTS = {
    "DropkvDown": (8, {("up", ""): "1x5 0x34"}),
    "DropkvNotReady": (8, {("dropkv_ready", ""): "1x5 0x34"}),
    "DropkvDrainsTooLong": (12, {("dropkv_ready", ""): "1x5 0x34", ("dropkv_draining", ""): "0x5 1x34"}),
    "DropkvRestartsOften": (12, {("process_start_time_seconds", ""): "100x5 500x1 600x1 700x32"}),
    "DropkvDeviceGivenUp": (8, {("dropkv_worker_given_up", WORKER): "0x5 1x34"}),
    "DropkvOnCpu": (8, {("dropkv_worker_fallback", WORKER): "0x5 1x34"}),
    "DropkvWorkerEnds": (16, {("dropkv_worker_restarts_total", WORKER): "0x5 0+1x34"}),
    "DropkvQueueOld": (10, {("dropkv_queue_age_seconds", 'priority="2"'): "0x5 3x34"}),
    "DropkvQueueNearlyFull": (10, {("dropkv_queue_requests", ""): "0x5 250x34"}),
    "DropkvBodiesNearlyFull": (10, {("dropkv_body_bytes", ""): "0x5 900000x34"}),
    "DropkvRefuses": (15, {("dropkv_requests_total", 'outcome="busy"'): "0+60x40"}),
    "DropkvFails": (15, {("dropkv_requests_total", 'outcome="failed"'): "0+1x40"}),
    "DropkvSlow": (20, {("dropkv_request_seconds_bucket", 'le="0.01"'): "0+500x40",
                        ("dropkv_request_seconds_bucket", 'le="1"'): "0+500x40"}),
    "DropkvDegrades": (15, {("dropkv_degraded_total", ""): "0x10 5x29"}),
    "DropkvNonFiniteInputs": (15, {("dropkv_nonfinite_inputs_total", 'action="masked"'): "0+1x40"}),
    "DropkvDescriptorsNearlyGone": (15, {("process_open_fds", ""): "900x40"}),
    "DropkvTokensRefused": (15, {("dropkv_http_refused_total", 'reason="auth"'): "0+120x40"}),
    "DropkvReloadFailed": (15, {("dropkv_config_reloads_total", 'result="failed"'): "0x10 1x29"}),
}


def promtool(*arguments, text=None):
    result = subprocess.run(["promtool", *arguments], input=text, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, check=False)
    return result.returncode, result.stdout


def rule_test(name, series, minutes_and_alerts):
    """One test of a promtool test file."""
    lines = ["  - name: %s" % name, "    interval: 1m", "    input_series:"]
    for (metric, labels), values in series.items():
        lines.append("      - {series: '%s{job=\"dropkv\",instance=\"n\"%s}', values: '%s'}"
                     % (metric, "," + labels if labels else "", values))
    lines.append("    promql_expr_test:")
    for minute, alert in minutes_and_alerts:
        lines += ["      - expr: 'count by (alertname) (ALERTS{alertstate=\"firing\"})'", "        eval_time: %dm" % minute]
        if alert:
            lines += ["        exp_samples:", "          - {labels: '{alertname=\"%s\"}', value: 1}" % alert]
    return lines


def run_rule_tests(folder, tests):
    path = os.path.join(folder, "rules.test.yml")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(["rule_files: [%s]" % RULES, "evaluation_interval: 1m", "tests:", *sum(tests, [])]))
    return promtool("test", "rules", path)


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def panels():
    return [p for p in json.loads(read(DASHBOARD))["panels"] if p["type"] != "row"]


def queries():
    """Every query of the dashboard, with Grafana's variables in place."""
    dashboard = json.loads(read(DASHBOARD))
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    found += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    return [q.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$instance", ".*") for q in found]


def series_names(text):
    """Metrics that a query or a rules file names; recorded ones have a colon."""
    return set(re.findall(r"(?<![\w:])(?:dropkv|process)_\w+", text))


class Rules(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def accept(self, result):
        self.assertEqual(result[0], 0, result[1])

    def test_rules_and_configuration_are_valid(self):
        self.accept(promtool("check", "rules", "--lint=all", "--lint-fatal", RULES))
        self.accept(promtool("check", "config", os.path.join(DEPLOY, "prometheus", "prometheus.yml")))

    def test_a_healthy_daemon_raises_no_alert(self):
        self.accept(run_rule_tests(self.folder, [rule_test("healthy", HEALTHY, [(5, None), (39, None)])]))

    def test_each_fault_raises_its_alert_and_no_other(self):
        self.assertEqual(set(FAULTS), set(re.findall(r"- alert: (\w+)", read(RULES))))
        for alert, (_, fault) in FAULTS.items():
            self.assertLessEqual(set(fault), set(HEALTHY), alert)
        self.accept(run_rule_tests(self.folder, [rule_test(alert, {**HEALTHY, **fault}, [(minute, alert)])
                                                 for alert, (minute, fault) in FAULTS.items()]))

    def test_a_wrong_expectation_is_noticed(self):
        code, _ = run_rule_tests(self.folder, [rule_test("healthy", HEALTHY, [(39, "DropkvDown")])])
        self.assertNotEqual(code, 0)

    def test_what_is_asked_for_is_there(self):
        with Daemon(DROPKVD) as daemon:
            text = daemon.get("/metrics").body.decode()
        there = set(re.findall(r"^(\w+)", text, flags=re.M))
        wanted = series_names(re.sub(r"(summary|description): .*", "", read(RULES))) | series_names(" ".join(queries()))
        self.assertGreater(len(wanted), 20)
        self.assertEqual(wanted - there, set())
        self.accept(promtool("check", "metrics", text=text))


class Dashboard(unittest.TestCase):
    def test_every_query_parses(self):
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            rules = [{"record": "query:%d" % i, "expr": query} for i, query in enumerate(queries())]
            json.dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)  # JSON is YAML
            file.flush()
            code, said = promtool("check", "rules", "--lint=none", file.name)
        self.assertEqual(code, 0, said)

    def test_panels_are_whole_and_do_not_overlap(self):
        everything = json.loads(read(DASHBOARD))["panels"]
        self.assertEqual(len({p["id"] for p in everything}), len(everything))
        taken = {}
        for panel in everything:
            at = panel["gridPos"]
            self.assertLessEqual(at["x"] + at["w"], 24, panel["title"])
            for x in range(at["x"], at["x"] + at["w"]):
                for y in range(at["y"], at["y"] + at["h"]):
                    self.assertNotIn((x, y), taken, panel["title"])
                    taken[x, y] = panel["title"]
        for panel in panels():
            self.assertTrue(panel["title"] and panel["targets"])
            for thing in (panel, *panel["targets"]):
                self.assertEqual(thing["datasource"], {"type": "prometheus", "uid": "${datasource}"})

    def test_every_variable_is_declared(self):
        text = read(DASHBOARD)
        declared = {v["name"] for v in json.loads(text)["templating"]["list"]}
        used = set(re.findall(r"\$\{?([a-z]\w*)", text)) - {"__rate_interval"}
        self.assertEqual(used, declared)


if __name__ == "__main__":
    if shutil.which("promtool") is None:
        print("skipped: promtool is not installed (Debian: prometheus)")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1], verbosity=2)

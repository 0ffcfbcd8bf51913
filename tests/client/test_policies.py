"""Policies and budgets from end to end: one answer over HTTP, the local socket and the embedded
engine, ragged or not, and every policy as a model.

usage: test_policies.py DROPKV_CLIENT DROPKVD TEST_DATA
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "server"))
from daemon import Daemon, infer_body, keep_indices, request  # noqa: E402

CLIENT, DROPKVD, DATA = sys.argv[1:4]
del sys.argv[1:4]
DUMP = str(pathlib.Path(DATA) / "dumps" / "tiny_dump_n1024.safetensors")
POLICIES = ["dropkv", "snapkv", "tova", "h2o", "cake", "andpro", "criticalkv", "restkv", "kvzip", "keydiff",
            "knorm", "streaming", "random", "external"]


def score(endpoint, *options):
    done = subprocess.run([CLIENT, "score", "--endpoint", endpoint, DUMP, "--format", "json", *options],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)["blocks"]


class Policies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.socket = os.path.join(cls.folder.name, "s")
        cls.daemon = Daemon(DROPKVD, "--socket", cls.socket)
        cls.http = "http://127.0.0.1:%d" % cls.daemon.port

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)
        cls.folder.cleanup()

    def everywhere(self, *options):
        blocks = score("embedded:", *options)
        self.assertEqual(blocks, score(self.http, *options))
        self.assertEqual(blocks, score("unix://" + self.socket, *options))
        return blocks

    def test_every_policy_has_one_answer(self):
        for policy in POLICIES[:-1]:
            with self.subTest(policy=policy):
                options = ("--policy", policy, "--keep-tokens", "100", "--heads", "uniform", "--scores")
                for block in self.everywhere(*options):
                    self.assertEqual(len(block["keep_indices"][0][0]), block["keep_tokens"])

    def test_heads_of_unequal_length_travel(self):
        for heads in ("adakv_mix", "adakv_floor", "global"):
            blocks = self.everywhere("--policy", "snapkv", "--keep-tokens", "60", "--heads", heads, "--scores")
            lengths = [[len(kept) for kept in block["keep_indices"][0]] for block in blocks]
            self.assertTrue(any(a != b for a, b in lengths), lengths)
            if heads != "adakv_mix":
                self.assertTrue(all(sum(pair) == 120 for pair in lengths), lengths)

    def test_andpro_has_its_published_budgets_by_default(self):
        """One cut for the layer's heads, in chunks of 4, of which the first is protected."""
        blocks = self.everywhere("--policy", "andpro", "--keep-tokens", "100")
        lengths = [[len(kept) for kept in block["keep_indices"][0]] for block in blocks]
        self.assertTrue(all(sum(pair) == 200 for pair in lengths), lengths)
        self.assertTrue(any(a != b for a, b in lengths), lengths)
        for kept in (head for block in blocks for head in block["keep_indices"][0]):
            self.assertEqual(kept[:4], [0, 1, 2, 3])
            self.assertEqual(kept, [4 * (kept[4 * i] // 4) + j for i in range(len(kept) // 4) for j in range(4)])

    def test_a_pyramid_falls_from_layer_to_layer(self):
        blocks = self.everywhere("--policy", "snapkv", "--window", "8", "--layers", "pyramid", "--keep-tokens", "108")
        lengths = [len(block["keep_indices"][0][0]) for block in blocks]
        self.assertEqual(lengths, sorted(lengths, reverse=True))
        self.assertGreater(lengths[0], lengths[-1])
        blocks = self.everywhere("--layers", "fixed", "--per-layer", "100,90,80,70,60,50")
        self.assertEqual([len(block["keep_indices"][0][1]) for block in blocks], [100, 90, 80, 70, 60, 50])
        blocks = self.everywhere("--layers", "fixed", "--per-head", "40,90")
        self.assertEqual([[len(kept) for kept in block["keep_indices"][0]] for block in blocks], [[40, 90]] * 6)

    def compare(self, *options):
        return subprocess.run([CLIENT, "compare", "--endpoint", "embedded:", DUMP, *options],
                              capture_output=True, text=True, check=False)

    def test_compare_finds_the_errors_that_are_known(self):
        """Measured once by another program, on this dump at window 8 without pooling."""
        done = self.compare("--policies", "dropkv,snapkv,random", "--keep-ratio", "0.05,0.1", "--window", "8",
                            "--recent", "8", "--pool", "none", "--format", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        found = {(r["policy"], r["keep_ratio"]): r for r in json.loads(done.stdout)["results"]}
        for (policy, ratio), known in {("dropkv", 0.05): 0.752, ("dropkv", 0.1): 0.364,
                                       ("snapkv", 0.05): 0.766, ("snapkv", 0.1): 0.356}.items():
            self.assertAlmostEqual(found[policy, ratio]["squared_error"], known, delta=0.01 * known)
        self.assertTrue(20 < found["random", 0.05]["squared_error"] < 40)
        self.assertGreater(found["dropkv", 0.05]["overlap"]["snapkv"], 0.7)
        self.assertLess(found["random", 0.05]["overlap"]["snapkv"], 0.5)

    def test_compare_says_what_the_theory_promises(self):
        """The figures of two layers were found once by another program, which tried all choices."""
        done = self.compare("--policies", "streaming", "--keep-ratio", "0.05,0.1,1", "--format", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        theory = json.loads(done.stdout)["theory"]
        self.assertEqual(theory["subset_tokens"], 20)
        self.assertEqual([layer["subsets"] for layer in theory["layers"]], [8] * 6)
        self.assertEqual(theory["subsets"], 48)
        layers = {layer["name"]: layer for layer in theory["layers"]}
        for name, cosines, along, ratio, worst in (
                ("layers.0", (0.106918837, 0.101576364), 0.709660843, 1.033949166, 1.129900095),
                ("layers.4", (0.196175179, 0.202212969), 0.990236382, 1.004235238, 1.026731262)):
            layer = layers[name]
            for cone, cosine in zip(layer["cones"], cosines):
                self.assertAlmostEqual(cone["cosine"], cosine, delta=1e-8)
                self.assertLessEqual(cone["lowest_cosine"], cone["cosine"])
            self.assertAlmostEqual(layer["cones"][0]["along"], along, delta=1e-8)
            self.assertAlmostEqual(layer["ratio"], ratio, delta=1e-8)
            self.assertAlmostEqual(layer["worst_ratio"], worst, delta=1e-8)
        self.assertEqual(theory["worst_ratio"], max(layer["worst_ratio"] for layer in theory["layers"]))
        self.assertEqual(theory["cones"][2], {"keep_ratio": 1, "cosine": None, "lowest_cosine": None, "along": None})
        table = self.compare("--policies", "streaming", "--by-layer")
        self.assertIn("cone of dropkv", table.stdout)
        self.assertIn("of 48 subsets", table.stdout)

    def test_compare_keeps_all_without_an_error(self):
        done = self.compare("--policies", "all", "--keep-ratio", "1", "--format", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        results = json.loads(done.stdout)["results"]
        self.assertEqual([r["policy"] for r in results], POLICIES[:-1])
        for result in results:
            self.assertLess(result["relative_error"], 1e-12)

    def test_compare_draws(self):
        for name, magic in (("p.svg", b"<?xml"), ("p.png", b"\x89PNG")):
            path = os.path.join(self.folder.name, name)
            done = self.compare("--policies", "dropkv,andpro", "--plot", path)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(path, "rb") as file:
                self.assertTrue(file.read().startswith(magic))
        self.assertNotEqual(self.compare("--plot", os.path.join(self.folder.name, "p.gif")).returncode, 0)
        self.assertNotEqual(self.compare("--plot", "/nonexistent/p.svg").returncode, 0)

    def test_compare_says_what_it_does_not_take(self):
        for options, word in ((("--policies", "dropkv,nosuch"), "nosuch"), (("--policies", "external"), "external"),
                              (("--policy", "snapkv"), "policies"), (("--keep-ratio", "0.1,x"), "keep-ratio")):
            done = self.compare(*options)
            self.assertEqual(done.returncode, 64, options)
            self.assertIn(word, done.stderr)

    def ask(self, model, head, data):
        text = json.dumps(head).encode()
        return self.daemon.ask(request("POST", "/v2/models/%s/infer" % model,
                                       ["Inference-Header-Content-Length: %d" % len(text)], text + data))

    def test_external_scores_are_ours_to_select(self):
        head, data = infer_body(tokens=64, kv_heads=2, parameters={"keep_tokens": 3, "heads": "global"})
        head = json.loads(head)
        scores = [float(-abs(t - 40)) for t in range(64)] + [-100.0 - t for t in range(64)]
        head["inputs"].append({"name": "external_scores", "datatype": "FP32", "shape": [1, 2, 64],
                               "parameters": {"binary_data_size": 512}})
        head["outputs"].append({"name": "keep_offsets", "parameters": {"binary_data": False}})
        reply = self.ask("external", head, data + struct.pack("<128f", *scores))
        self.assertEqual(reply.status, 200, reply.body)
        self.assertEqual(keep_indices(reply), [38, 39, 40, 41, 42, 0])
        length = int(reply.fields["inference-header-content-length"])
        answer = json.loads(reply.body[:length])
        self.assertEqual(answer["model_name"], "external")
        self.assertEqual(answer["outputs"][1]["data"], [0, 5, 6])

    def test_a_tensor_that_a_policy_does_not_take_is_refused_by_name(self):
        head, data = infer_body(tokens=64)
        head = json.loads(head)
        head["inputs"].append({"name": "token_weight", "datatype": "FP32", "shape": [1, 1, 64],
                               "parameters": {"binary_data_size": 256}})
        data += struct.pack("<64f", *range(64))
        reply = self.ask("snapkv", head, data)
        self.assertEqual(reply.status, 400)
        self.assertIn("token_weight", reply.error())
        self.assertEqual(self.ask("criticalkv", head, data).status, 200)
        head["inputs"][-1]["shape"] = [1, 1, 32]
        self.assertIn("token_weight", self.ask("criticalkv", head, data[:-128]).error())

    def test_every_policy_is_a_model(self):
        for policy in POLICIES:
            reply = self.daemon.ask(request("GET", "/v2/models/%s" % policy))
            self.assertEqual(reply.status, 200)
            document = json.loads(reply.body)
            self.assertEqual(document["name"], policy)
            self.assertEqual(document["parameters"]["policy"], policy)
            self.assertEqual(self.daemon.ask(request("GET", "/v2/models/%s/config" % policy)).status, 200)
            self.assertEqual(self.daemon.ask(request("GET", "/v2/models/%s/ready" % policy)).status, 200)
        self.assertEqual(self.daemon.ask(request("GET", "/v2/models/nosuch")).status, 404)
        head, data = infer_body(parameters={"keep_ratio": 0.25, "policy": "cake"})
        reply = self.ask("snapkv", json.loads(head), data)
        self.assertEqual(reply.status, 400)
        self.assertIn("policy", reply.error())


if __name__ == "__main__":
    unittest.main()

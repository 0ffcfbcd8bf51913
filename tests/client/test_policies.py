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


def score(endpoint, *options, dumps=(DUMP,)):
    done = subprocess.run([CLIENT, "score", "--endpoint", endpoint, *dumps, "--format", "json", *options],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)["blocks"]


def strip(blocks):
    """Without names, which several dumps lengthen."""
    return [{key: value for key, value in block.items() if key != "name"} for block in blocks]


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

    def everywhere(self, *options, dumps=(DUMP,)):
        blocks = score("embedded:", *options, dumps=dumps)
        self.assertEqual(blocks, score(self.http, *options, dumps=dumps))
        self.assertEqual(blocks, score("unix://" + self.socket, *options, dumps=dumps))
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

    def test_cake_deals_the_layers_of_a_dump(self):
        """The same layers in one tensor and in one of each, in an order that needs copies and in one that does not."""
        data = pathlib.Path(DUMP).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        roles = ("query", "key", "value")

        def write(name, tensors):
            head, content = {}, b""
            for key, shape, part in tensors:
                head[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(content), len(content) + len(part)]}
                content += part
            text = json.dumps(head).encode()
            path = os.path.join(self.folder.name, name)
            pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + content)
            return path

        def layer(l, role):
            t = header["layers.%d.%s" % (l, role)]
            return "layers.%d.%s" % (l, role), t["shape"], body[slice(*t["data_offsets"])]

        whole = write("whole.safetensors", [("all." + role, [6, *layer(0, role)[1][1:]],
                                             b"".join(layer(l, role)[2] for l in range(6))) for role in roles])
        mixed = write("mixed.safetensors", [layer(l, role) for role in roles for l in (3, 1, 0, 5, 2, 4)])
        options = ("--policy", "cake", "--window", "8", "--keep-tokens", "100", "--layers", "cake", "--scores")
        (one,) = self.everywhere(*options, dumps=(whole,))
        blocks = self.everywhere(*options)
        self.assertEqual([block["name"] for block in blocks], ["layers.%d" % l for l in range(6)])
        self.assertEqual([block["keep_indices"][0] for block in blocks], one["keep_indices"])
        self.assertEqual([block["scores"][0] for block in blocks], one["scores"])
        lengths = [len(block["keep_indices"][0][0]) for block in blocks]
        self.assertEqual(sum(lengths), 600)
        self.assertGreater(max(lengths), 110)
        self.assertEqual(blocks, score("embedded:", *options, dumps=(mixed,)))
        for form in ("table", "safetensors"):
            done = subprocess.run([CLIENT, "score", "--endpoint", "embedded:", DUMP, *options, "--format", form],
                                  capture_output=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
        done = subprocess.run([CLIENT, "score", "--endpoint", "embedded:", DUMP, whole, *options], capture_output=True,
                              text=True, check=False)
        self.assertEqual(done.returncode, 65)
        self.assertIn("the layers of one request are alike", done.stderr)

    def with_tensors(self, name, **tensors):
        """A dump in which every layer has these float32 tensors, too, and one that holds them alone."""
        data = pathlib.Path(DUMP).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header, body, alone = json.loads(data[8 : 8 + length]), data[8 + length :], {}
        for layer in range(6):
            for role, (shape, make) in tensors.items():
                n = 1
                for extent in shape:
                    n *= extent
                floats = struct.pack("<%df" % n, *(make(layer, i) for i in range(n)))
                alone["layers.%d.%s" % (layer, role)] = ("F32", shape, floats)
        both = {key: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for key, t in header.items()
                if key != "__metadata__"}
        paths = []
        for which, content in (("both", {**both, **alone}), ("alone", alone)):
            head, data = {}, b""
            for key, (dtype, shape, part) in content.items():
                head[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
                data += part
            text = json.dumps(head).encode()
            paths.append(os.path.join(self.folder.name, "%s.%s.safetensors" % (name, which)))
            pathlib.Path(paths[-1]).write_bytes(struct.pack("<Q", len(text)) + text + data)
        return paths

    def test_what_policies_take_comes_from_dumps(self):
        """Beside the block's tensors, in a file of their own, or by a name of the caller's; one answer everywhere."""
        by_token = [1, 2, 1024]
        for policy, role, shape, make in (
                ("criticalkv", "token_weight", by_token, lambda layer, i: 1.0 + (i * 37 + layer) % 1000),
                ("h2o", "carry_in", by_token, lambda layer, i: (i * 53 + layer) % 16),
                ("kvzip", "carry_in", by_token, lambda layer, i: (i * 53 + layer) % 1024 / 1024),
                ("restkv", "value_metric", [8, 64, 64], lambda layer, i: (i % 65 == 0) * (1.0 + i // 65 % 64))):
            with self.subTest(policy=policy):
                both, alone = self.with_tensors(policy, **{role: (shape, make)})
                options = ("--policy", policy, "--keep-tokens", "100", "--scores")
                without = self.everywhere(*options)
                blocks = self.everywhere(*options, dumps=(both,))
                self.assertNotEqual([block["keep_indices"] for block in blocks],
                                    [block["keep_indices"] for block in without])
                self.assertEqual(strip(blocks), strip(score("embedded:", *options, dumps=(DUMP, alone))))
                named = ("--" + role.replace("_", "-"), "{}." + role)
                self.assertEqual(blocks, score("embedded:", *options, *named, dumps=(both,)))
                self.assertEqual(without, score("embedded:", *options, dumps=(DUMP,)))

    def test_scores_given_are_what_external_selects_by(self):
        both, _ = self.with_tensors("external", external_scores=([2, 1024], lambda layer, i: -abs(i % 1024 - 100 * layer)))
        blocks = self.everywhere("--policy", "external", "--keep-tokens", "3", dumps=(both,))
        for layer, block in enumerate(blocks[1:], 1):
            self.assertEqual(block["keep_indices"], [[[100 * layer + d for d in (-1, 0, 1)]] * 2])

    def test_tensors_that_are_not_what_a_policy_takes_are_named(self):
        def failed(dump, *options):
            done = subprocess.run([CLIENT, "score", "--endpoint", "embedded:", dump, *options], capture_output=True,
                                  text=True, check=False)
            self.assertEqual(done.returncode, 65, options)
            return done.stderr

        both, _ = self.with_tensors("wrong", token_weight=([1, 2, 1023], lambda layer, i: 1.0))
        self.assertIn("token_weight: shape[2] is 1023, the block needs 1024", failed(both, "--policy", "criticalkv"))
        self.assertIn("token_weight: elements of type BF16, F32 is needed",
                      failed(both, "--policy", "criticalkv", "--token-weight", "{}.key"))
        self.assertIn("there is no tensor layers.0.nothing", failed(both, "--policy", "h2o", "--carry-in", "{}.nothing"))
        self.assertIn("external_scores: policy external needs them", failed(DUMP, "--policy", "external"))
        both, _ = self.with_tensors("refused", token_weight=([2, 1024], lambda layer, i: 1.0))
        self.assertIn("token_weight: policy snapkv does not take it",
                      failed(both, "--policy", "snapkv", "--token-weight", "{}.token_weight"))
        both, _ = self.with_tensors("negative", token_weight=([2, 1024], lambda layer, i: -1.0))
        self.assertIn("token_weight", failed(both, "--policy", "criticalkv"))

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
        table = self.compare("--policies", "streaming", "--by-layer", "--rows", "2")
        self.assertIn("cone of dropkv", table.stdout)
        self.assertIn("of 48 subsets", table.stdout)

    def test_compare_finds_what_policies_take(self):
        both, _ = self.with_tensors("compared", token_weight=([2, 1024], lambda layer, i: 1.0 + i * 37 % 1000))
        errors = [json.loads(subprocess.run([CLIENT, "compare", "--endpoint", "embedded:", dump, "--policies", "criticalkv",
                                             "--rows", "2", "--format", "json"], capture_output=True, check=True).stdout)
                  ["results"][0]["squared_error"] for dump in (DUMP, both)]
        self.assertNotAlmostEqual(errors[0], errors[1], delta=0.01 * errors[0])

    def test_compare_takes_the_attention_it_is_told(self):
        """Logits that are all but equal, by their scale or by their cap."""
        errors = []
        for options in ((), ("--scale", "1e-6"), ("--logit-softcap", "1e-3")):
            done = self.compare("--policies", "streaming", "--keep-ratio", "0.1", "--format", "json", "--rows", "2", *options)
            self.assertEqual(done.returncode, 0, done.stderr)
            errors.append(json.loads(done.stdout)["results"][0]["squared_error"])
        self.assertAlmostEqual(errors[1], errors[2], delta=0.01 * errors[1])
        self.assertNotAlmostEqual(errors[0], errors[1], delta=0.1 * errors[0])

    def test_compare_keeps_all_without_an_error(self):
        done = self.compare("--policies", "all", "--keep-ratio", "1", "--format", "json", "--rows", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        results = json.loads(done.stdout)["results"]
        self.assertEqual([r["policy"] for r in results], POLICIES[:-1])
        for result in results:
            self.assertLess(result["relative_error"], 1e-12)

    def test_compare_draws(self):
        for name, magic in (("p.svg", b"<?xml"), ("p.png", b"\x89PNG")):
            path = os.path.join(self.folder.name, name)
            done = self.compare("--policies", "dropkv,andpro", "--plot", path, "--rows", "2")
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(path, "rb") as file:
                self.assertTrue(file.read().startswith(magic))
        self.assertNotEqual(self.compare("--rows", "1", "--plot", os.path.join(self.folder.name, "p.gif")).returncode, 0)
        self.assertNotEqual(self.compare("--rows", "1", "--plot", "/nonexistent/p.svg").returncode, 0)

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

"""dropkv-client as people and scripts use it: the embedded engine, then a real daemon.

usage: test_cli.py DROPKV_CLIENT DROPKVD TEST_DATA
"""
import array
import json
import os
import pathlib
import pty
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "server"))
from daemon import Daemon  # noqa: E402

CLIENT, DROPKVD, DATA = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
del sys.argv[1:]
DUMP = DATA / "dumps" / "tiny_dump_n1024.safetensors"
GOLDEN = sorted((DATA / "golden").glob("*.safetensors"))
NOBODY = "http://127.0.0.1:1"
CONTROL = [*range(0x20), 0x7F]


def run(*arguments, **environment):
    env = {**os.environ, "LC_ALL": "C.UTF-8", "COLUMNS": "100",
           "XDG_RUNTIME_DIR": "/nonexistent", **environment}
    env.pop("DROPKV_TOKEN", None) if "DROPKV_TOKEN" not in environment else None
    return subprocess.run([CLIENT, *map(str, arguments)], capture_output=True, env=env, timeout=300)


def embedded(*arguments, **environment):
    return run("score", "--endpoint", "embedded:", *arguments, **environment)


def read_safetensors(data):
    """({name: (dtype, shape, bytes)}, metadata)"""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    return {n: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for n, t in header.items()}, metadata


def write_safetensors(path, tensors):
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def write_npy(path, descr, shape, data):
    header = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }\n" % (descr, tuple(shape))
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data)


def read_npy(path, typecode):
    data = path.read_bytes()
    (length,) = struct.unpack("<H", data[8:10])
    return data[10 : 10 + length].decode(), list(array.array(typecode, data[10 + length :]))


def flat(nested):
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]


class Case(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self._folder.name)
        self.addCleanup(self._folder.cleanup)

    def ok(self, done):
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        return done.stdout

    def fails(self, done, code, *parts):
        """One plain line on standard error that names all `parts`, and nothing on standard output."""
        said = done.stderr.decode()
        self.assertEqual(done.returncode, code, said)
        self.assertTrue(said.startswith("dropkv-client: "), said)
        self.assertEqual(said.count("\n"), 1, said)
        self.assertEqual(done.stdout, b"")
        for part in parts:
            self.assertIn(str(part), said)
        self.assertFalse([c for c in said[:-1] if ord(c) in CONTROL], repr(said))


class Embedded(Case):
    def test_json_has_the_documented_shape(self):
        report = json.loads(self.ok(embedded(DUMP, "--format", "json", "--scores")))
        self.assertEqual(sorted(report), ["backend", "blocks", "endpoint"])
        self.assertEqual(report["endpoint"], "embedded:")
        self.assertTrue(report["backend"].startswith("cpu/"))
        self.assertEqual([b["name"] for b in report["blocks"]], ["layers.%d" % i for i in range(6)])
        for block in report["blocks"]:
            self.assertEqual(
                (block["batch"], block["q_heads"], block["kv_heads"], block["tokens"], block["keep_tokens"]),
                (1, 8, 2, 1024, 102))
            self.assertEqual([len(h) for b in block["keep_indices"] for h in b], [102, 102])
            self.assertEqual([len(h) for b in block["scores"] for h in b], [1024, 1024])
            for head in block["keep_indices"][0]:
                self.assertEqual(head, sorted(set(head)))
                self.assertEqual(head[-8:], list(range(1016, 1024)))
        without = json.loads(self.ok(embedded(DUMP, "-f", "json")))
        self.assertNotIn("scores", without["blocks"][0])

    def test_all_forms_tell_the_same(self):
        report = json.loads(self.ok(embedded(DUMP, "--format", "json", "--scores")))
        tensors, metadata = read_safetensors(self.ok(embedded(DUMP, "--format", "safetensors", "--scores")))
        self.assertEqual(metadata["backend"], report["backend"])
        self.assertEqual(len(tensors), 12)
        for block in report["blocks"]:
            dtype, shape, data = tensors[block["name"] + ".keep_indices"]
            self.assertEqual((dtype, shape), ("I32", [1, 2, 102]))
            self.assertEqual(list(array.array("i", data)), flat(block["keep_indices"]))
            dtype, shape, data = tensors[block["name"] + ".scores"]
            self.assertEqual((dtype, shape), ("F32", [1, 2, 1024]))
            self.assertEqual(data, array.array("f", flat(block["scores"])).tobytes())

    def test_npy_in_and_out(self):
        source = DATA / "golden" / "qwen_like_bf16.safetensors"
        tensors, _ = read_safetensors(source.read_bytes())
        for name in ("query", "key", "value"):
            _, shape, data = tensors[name]
            write_npy(self.folder / (name + ".npy"), "|V2", shape, data)
        files = ["--query", self.folder / "query.npy", "--key", self.folder / "key.npy",
                 "--value", self.folder / "value.npy"]
        self.fails(embedded(*files), 65, "query.npy", "'|V2'", "--dtype")
        out = self.folder / "keep.npy"
        self.ok(embedded(*files, "--dtype", "bf16", "--format", "npy", "--output", out, "--scores"))
        block = json.loads(self.ok(embedded(source, "-f", "json", "-s")))["blocks"][0]
        header, keep = read_npy(out, "i")
        self.assertIn("'<i4'", header)
        self.assertEqual(keep, flat(block["keep_indices"]))
        _, scores = read_npy(self.folder / "keep.scores.npy", "f")
        self.assertEqual(scores, list(array.array("f", flat(block["scores"]))))
        self.fails(embedded(DUMP, "--format", "npy"), 64, "one block", "6")
        self.fails(embedded(source, "--format", "npy", "--scores"), 64, "--output")

    def test_what_a_policy_takes_may_be_an_npy_file(self):
        source = DATA / "golden" / "qwen_like_bf16.safetensors"
        heads, tokens = read_safetensors(source.read_bytes())[0]["key"][1][1:3]
        given = self.folder / "given.npy"
        scores = array.array("f", (float(t) for _ in range(heads) for t in range(tokens, 0, -1)))
        write_npy(given, "<f4", [heads, tokens], scores.tobytes())
        options = ("--policy", "external", "--keep-tokens", "3", "-f", "json", "--external-scores")
        block = json.loads(self.ok(embedded(source, *options, given)))["blocks"][0]
        self.assertEqual(block["keep_indices"], [[[0, 1, 2]] * heads])
        self.fails(embedded(DUMP, *options, given), 64, "given.npy", "several blocks")
        self.fails(embedded(source, *options, self.folder / "none.npy"), 66, "none.npy")
        text = self.folder / "text.npy"
        text.write_text("no array")
        self.fails(embedded(source, *options, text), 65, "text.npy")

    def test_golden_files_keep_what_two_oracles_keep(self):
        """Exactly, where the cut is not a tie for float32; the kernels' tests judge the others."""
        n_compared = 0
        for path in GOLDEN:
            tensors, metadata = read_safetensors(path.read_bytes())
            for name, about in json.loads(metadata["keep"]).items():
                if about["min_gap"] < 1e-3:
                    continue
                pool, ratio = name.split(".", 1)
                word = pool.rstrip("0123456789")
                options = ["--pool", word, "--keep-ratio", ratio[1:], "--window", metadata["window"]]
                options += ["--kernel", pool[len(word):]] if word != "none" else []
                report = json.loads(self.ok(embedded(path, "-f", "json", *options)))
                expected = list(array.array("i", tensors["expected.keep." + name][2]))
                self.assertEqual(flat(report["blocks"][0]["keep_indices"]), expected, (path.name, name))
                n_compared += 1
        self.assertGreater(n_compared, 20)

    def test_the_table_fits_and_tells_each_block(self):
        for width in (80, 100, 200):
            lines = self.ok(embedded(DUMP, COLUMNS=str(width))).decode().splitlines()
            self.assertLessEqual(max(map(len, lines[:7])), width)
            self.assertEqual([line.split()[0] for line in lines[1:7]], ["layers.%d" % i for i in range(6)])
            for line in lines[1:7]:
                self.assertIn("102 (10.0%)", line)
                self.assertIn("1,024", line)
        self.assertIn("6 blocks, 12 KV heads: 1,224 of 12,288 tokens kept", "\n".join(lines))
        self.assertTrue(any("█" in line for line in lines))
        self.assertNotIn("\033", "\n".join(lines))
        plain = self.ok(embedded(DUMP, LC_ALL="C")).decode("ascii")
        self.assertIn("@", plain)
        by_head = self.ok(embedded(DUMP, "--by-head")).decode().splitlines()
        self.assertEqual(len([line for line in by_head if line.startswith("layers.")]), 12)

    def test_shares_of_the_table_are_those_of_the_indices(self):
        lines = self.ok(embedded(DUMP, "--sinks", "4", "--keep-tokens", "48", "--recent", "12")).decode().splitlines()
        for line in lines[1:7]:
            self.assertIn("8%     25%     67%", line)

    def test_parameters_reach_the_engine(self):
        base = self.ok(embedded(DUMP, "-f", "json"))
        for options in (["--profile", "kvpress"], ["--window", "16"], ["--pool", "none"], ["--gqa", "max"],
                        ["--scale", "0.5"], ["--logit-softcap", "5"], ["--sinks", "9"], ["--recent", "40"]):
            self.assertNotEqual(self.ok(embedded(DUMP, "-f", "json", *options)), base, options)
        budget = json.loads(self.ok(embedded(DUMP, "-f", "json", "--compression-ratio", "0.75")))
        self.assertEqual(budget["blocks"][0]["keep_tokens"], 256)

    def test_patterns_choose_tensors(self):
        names = ["--query", "layers.{}.query", "--key", "layers.{}.key", "--value", "layers.{}.value"]
        report = json.loads(self.ok(embedded(DUMP, "-f", "json", *names)))
        self.assertEqual([b["name"] for b in report["blocks"]], [str(i) for i in range(6)])
        one = [n.replace("{}", "3") for n in names]
        alone = json.loads(self.ok(embedded(DUMP, "-f", "json", *one)))
        self.assertEqual(alone["blocks"][0]["keep_indices"], report["blocks"][3]["keep_indices"])
        self.fails(embedded(DUMP, *names[:2]), 64, "belong together")
        self.fails(embedded(DUMP, *[n.replace("layers", "no") for n in names]), 65, DUMP, "no tensors match")

    def test_threads_do_not_change_the_answer(self):
        answers = {self.ok(run("score", "-e", "embedded:cpu?threads=%d" % n, DUMP, "-f", "json", "-s"))
                   .split(b"\n", 1)[1] for n in (1, 2, 3)}
        self.assertEqual(len(answers), 1)

    def test_several_dumps_are_one_report(self):
        report = json.loads(self.ok(embedded(DUMP, GOLDEN[0], "-f", "json")))
        self.assertEqual([b["name"] for b in report["blocks"]],
                         ["tiny_dump_n1024:layers.%d" % i for i in range(6)] + [GOLDEN[0].stem])

    def test_a_dump_named_twice_gives_two_blocks(self):
        tensors, _ = read_safetensors(self.ok(embedded(GOLDEN[0], GOLDEN[0], "-f", "safetensors")))
        self.assertEqual(sorted(tensors), sorted(GOLDEN[0].stem + end + ".keep_indices" for end in ("", "#2")))

    def test_colours_are_for_terminals_without_no_color(self):
        for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
            env = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "90", **extra}
            if "NO_COLOR" not in extra:
                env.pop("NO_COLOR", None)
            leader, follower = pty.openpty()
            with subprocess.Popen([CLIENT, "score", "-e", "embedded:", DUMP], stdout=follower, stderr=follower,
                                  env=env) as process:
                os.close(follower)
                seen = b""
                try:
                    while piece := os.read(leader, 65536):
                        seen += piece
                except OSError:  # how a terminal without a process ends
                    pass
                os.close(leader)
            self.assertEqual(process.returncode, 0)
            self.assertEqual(b"\033[" in seen, coloured, (extra, seen))
            self.assertIn("█".encode(), seen)

    def test_an_output_file_holds_what_standard_output_would(self):
        out = self.folder / "kept.json"
        self.assertEqual(self.ok(embedded(DUMP, "-f", "json", "-o", out)), b"")
        self.assertEqual(out.read_bytes(), self.ok(embedded(DUMP, "-f", "json")))


class Failures(Case):
    def test_usage_errors_exit_64(self):
        self.assertEqual(run().returncode, 64)
        self.fails(run("scroe"), 64, "'scroe'", "score, compare, bench, info, health")
        self.fails(embedded(), 64, "no dump")
        self.fails(embedded(DUMP, "--colour", "1"), 64, "--colour")
        self.fails(embedded(DUMP, "--window"), 64, "--window")
        self.fails(embedded(DUMP, "--window", "eight"), 64, "--window", "eight")
        self.fails(embedded(DUMP, "--pool", "median"), 64, "--pool", "median", "max")
        self.fails(embedded(DUMP, "--window", "8", "--window", "9"), 64, "--window", "twice")
        self.fails(embedded(DUMP, "--format", "xml"), 64, "'xml'", "json")
        self.fails(run("bench", "-e", "embedded:", "--tokens", "0"), 64, "--tokens", "1..")
        self.fails(run("bench", "-e", "embedded:", "--rate", "nan"), 64, "--rate")
        self.fails(run("bench", "-e", "embedded:", "--dtype", "int4"), 64, "'int4'")
        self.fails(run("bench", "extra"), 64, "'extra'")
        self.fails(run("info", "--format", "yaml"), 64, "'yaml'")

    def test_bad_data_exits_65(self):
        bad = self.folder / "bad.safetensors"
        whole = DUMP.read_bytes()
        bad.write_bytes(whole[:-1])
        self.fails(embedded(bad), 65, bad, "past the")
        bad.write_bytes(b"\xff" * 64)
        self.fails(embedded(bad), 65, bad, "not a safetensors file?")
        bad.write_bytes(b"")
        self.fails(embedded(bad), 65, bad, "empty")
        self.fails(embedded(self.folder), 65, self.folder, "not a regular file")
        self.fails(embedded(DUMP, "--window", "513"), 65, "window", "513", "1..512")
        self.fails(embedded(DUMP, "--keep-ratio", "0.1", "--keep-tokens", "5"), 65, "keep_ratio")
        write_safetensors(bad, {"q": ("F32", [1, 1, 1, 8], bytes(32)), "k": ("F32", [1, 1, 4, 8], bytes(128)),
                                "v": ("F32", [1, 1, 5, 8], bytes(160))})
        self.fails(embedded(bad), 65, "the number of tokens differs: 4 in the key, 5 in the value")

    def test_a_non_finite_element_is_named(self):
        bad = self.folder / "nan.safetensors"
        key = bytearray(4 * 64 * 8)
        key[4 * (9 * 8 + 5) : 4 * (9 * 8 + 6)] = struct.pack("<f", float("nan"))
        write_safetensors(bad, {"q": ("F32", [1, 1, 8, 8], bytes(256)), "k": ("F32", [1, 1, 64, 8], bytes(key)),
                                "v": ("F32", [1, 1, 64, 8], bytes(2048))})
        self.fails(embedded(bad), 65, "nan: ", "key", "9", "5")

    def test_names_that_hold_terminal_commands_are_shown_harmless(self):
        bad = self.folder / "bad.safetensors"
        write_safetensors(bad, {"\033]0;x\007.q": ("F32", [1, 1, 1, 8], bytes(32)),
                                "\033]0;x\007.k": ("F32", [1, 1, 4, 8], bytes(128))})
        self.fails(embedded(bad), 65, "block ?]0;x? has no value")

    def test_files_that_are_not_there_exit_66_and_73(self):
        self.fails(embedded(self.folder / "none"), 66, "none", "No such file")
        self.fails(embedded(DUMP, "-f", "json", "-o", self.folder / "no" / "x"), 73, "could not create")

    def test_a_full_disk_exits_74(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        for name in ("table", "json", "safetensors"):
            with open("/dev/full", "wb") as full:
                done = subprocess.run([CLIENT, "score", "-e", "embedded:", DUMP, "-f", name], stdout=full,
                                      stderr=subprocess.PIPE, timeout=60)
            self.assertEqual(done.returncode, 74, done.stderr)

    def test_an_endpoint_where_nobody_listens_exits_69(self):
        self.fails(run("score", "-e", NOBODY, DUMP), 69, "nobody listens")
        self.fails(run("health", "-e", NOBODY), 69, NOBODY)
        self.fails(run("info", "-e", NOBODY), 69, NOBODY)

    def test_endpoints_of_other_kinds_say_so(self):
        self.fails(run("score", "-e", "unix:x", DUMP), 65, "unix:///PATH")
        self.fails(run("score", "-e", "unix:///nonexistent/x", DUMP), 69, "nobody answers")
        self.fails(run("score", "-e", "localhost:1", DUMP), 65, "http://HOST:PORT")
        self.fails(run("score", "-e", "embedded:tpu", DUMP), 65, "tpu")
        self.fails(run("score", "-e", "embedded:cpu?threads=0", DUMP), 65, "threads")


class WorkingDirectory(Case):
    def test_it_holds_no_engines(self):
        """Called by its name alone the program does not take what lies here for what lies beside it."""
        with tempfile.TemporaryDirectory() as folder:
            for name in ("dkv-cuda.so", "cuda/dkv-cuda.so", "kernels/cuda/dkv-cuda.so"):
                os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(b"planted")
            done = subprocess.run(["dropkv-client", "info", "-e", "embedded:cuda:1023"], executable=os.path.abspath(CLIENT),
                                  cwd=folder, capture_output=True, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertNotIn(b"does not load", done.stderr)


class Help(Case):
    def test_help_names_every_option_and_parameter(self):
        for arguments in (["--help"], ["help"], ["score", "--help"], ["bench", "--help"], ["info", "--help"],
                          ["health", "--help"]):
            text = self.ok(run(*arguments)).decode()
            self.assertGreater(len(text), 100)
        text = self.ok(run("score", "--help")).decode()
        for name in ("keep-ratio", "logit-softcap", "on-conflict", "endpoint", "format", "scores", "timeout"):
            self.assertIn("--" + name + "=" if name != "scores" else "--scores", text)
        self.assertIn("Usage: dropkv-client score DUMP.safetensors...", text)

    def test_the_version_is_told(self):
        self.assertRegex(self.ok(run("--version")).decode(), r"^dropkv-client \d+\.\d+\.\d+\n$")


class Bench(Case):
    BLOCK = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--tokens", "512", "--warmup", "0"]

    def test_embedded_json_has_the_documented_fields(self):
        for dtype in ("bf16", "fp16", "fp32", "f8_e4m3", "f8_e5m2"):
            report = json.loads(self.ok(run("bench", "-e", "embedded:", *self.BLOCK, "--dtype", dtype,
                                            "--duration", "0.05", "--format", "json")))
            latency = report["latency_us"]
            self.assertGreater(latency["p50"], 0)
            self.assertTrue(latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"])
            self.assertAlmostEqual(report["tokens_per_s"], 512 * report["blocks_per_s"], delta=1)
            width = {"bf16": 2, "fp16": 2, "fp32": 4}.get(dtype, 1)
            self.assertEqual(report["block"]["bytes"], 2 * 2 * 512 * 64 * width + 4 * 8 * 64 * max(width, 2))
            self.assertEqual((report["errors"], report["unsent"]), (0, 0))
            self.assertGreater(report["multiply_adds_per_s"], 0)
            self.assertTrue(report["backend"].startswith("cpu/"))

    def test_an_open_loop_charges_for_waiting(self):
        """Fifty times more than can be done: latency grows with the backlog, up to the duration."""
        fast = ["bench", "-e", "embedded:", *self.BLOCK, "--format", "json"]
        closed = json.loads(self.ok(run(*fast, "--duration", "0.2")))
        rate = 50 * closed["blocks_per_s"]
        report = json.loads(self.ok(run(*fast, "--duration", "0.5", "--rate", str(rate), "--streams", "1")))
        self.assertGreater(report["unsent"], 0)
        self.assertGreater(report["latency_us"]["p50"], 100000)

    def test_the_table_names_block_and_backend(self):
        text = self.ok(run("bench", "-e", "embedded:", *self.BLOCK, "--duration", "0.05")).decode()
        for part in ("4/2 heads, 512 tokens", "cpu/", "p99", "blocks/s", "multiply-adds/s", "0 errors"):
            self.assertIn(part, text)

    def test_memory_that_cannot_be_had_is_named(self):
        limited = ["sh", "-c", 'ulimit -v 200000 && exec "$@"', "sh", CLIENT]
        if subprocess.run([*limited, "--version"], capture_output=True, timeout=60).returncode != 0:
            self.skipTest("a sanitizer reserves more than any limit")
        done = subprocess.run([*limited, "bench", "-e", "embedded:", "--tokens", "262144"], capture_output=True,
                              timeout=60)
        self.fails(done, 71, "1073807360 bytes")

    def test_nobody_there_is_an_error(self):
        done = run("bench", "-e", NOBODY, *self.BLOCK, "--duration", "0.05")
        self.assertEqual(done.returncode, 69, done.stderr)


class OverHttp(Case):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.socket = "unix://" + folder.name + "/run/dropkvd.sock"
        cls.daemon = Daemon(DROPKVD, "--socket", cls.socket.removeprefix("unix://")).__enter__()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.url = "http://127.0.0.1:%d" % cls.daemon.port

    def test_the_daemon_answers_as_the_embedded_engine_does(self):
        for path in (DUMP, *GOLDEN):
            here = json.loads(self.ok(embedded(path, "-f", "json", "-s")))
            there = json.loads(self.ok(run("score", "-e", self.url, path, "-f", "json", "-s")))
            self.assertEqual(there["endpoint"], self.url)
            self.assertEqual(there["blocks"], here["blocks"], path.name)

    def test_parameters_cross_the_wire(self):
        options = ["--profile", "author", "--keep-tokens", "77", "--sinks", "3", "--pool-scope", "prefix", "-f", "json"]
        here = json.loads(self.ok(embedded(DUMP, *options)))
        there = json.loads(self.ok(run("score", "-e", self.url, DUMP, *options)))
        self.assertEqual(there["blocks"], here["blocks"])

    def test_all_layers_of_a_registered_cache_are_one_request(self):
        block = ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--tokens", "512", "--warmup", "0"]
        for endpoint in (self.socket, "embedded:"):
            done = run("bench", "-e", endpoint, *block, "--cache-layers", "5", "--duration", "0.1", "--format", "json")
            report = json.loads(self.ok(done))
            self.assertEqual((report["errors"], report["block"]["batch"]), (0, 5))
            self.assertAlmostEqual(report["blocks_per_s"] * report["duration_s"], 5 * report["requests"], delta=1)
            self.assertTrue(report["backend"].startswith("cpu/"))
        self.fails(run("bench", "-e", self.url, *block, "--cache-layers", "5"), 65, "unix:///")
        self.fails(run("bench", "-e", self.socket, "--cache-layers", "5", "--batch", "2"), 64, "--batch")

    def test_info_and_health(self):
        told = json.loads(self.ok(run("info", "-e", self.url, "--format", "json")))
        self.assertEqual((told["server"], told["endpoint"]), ("dropkvd", self.url))
        over_socket = json.loads(self.ok(run("info", "-e", self.socket, "--format", "json")))
        self.assertEqual(over_socket, told | {"endpoint": self.socket})
        self.assertTrue(told["backend"].startswith("cpu/"))
        self.assertIn(b"dropkvd", self.ok(run("info", "-e", self.url)))
        self.assertIn(b"ready", self.ok(run("health", "-e", self.url)))
        self.assertEqual(self.ok(run("health", "-q", "-e", self.url)), b"")

    def test_bench_counts_what_the_server_counts(self):
        before = self.daemon.metrics()
        report = json.loads(self.ok(run("bench", "-e", self.url, *Bench.BLOCK, "--streams", "4", "--duration", "0.3",
                                        "--format", "json")))
        after = self.daemon.metrics()
        name = next(k for k in after if k.startswith("dropkv_requests_total") and "ok" in k.lower())
        counted = after[name] - before.get(name, 0)
        # The warm-up sends one request a stream, which are not measured.
        self.assertEqual(counted, report["requests"] + 4)
        self.assertEqual(report["errors"], 0)
        self.assertNotIn("multiply_adds_per_s", report)


class Tokens(Case):
    def test_a_token_is_asked_for_and_taken_from_the_environment(self):
        tokens = self.folder / "tokens"
        tokens.write_text("0123456789abcdef0123456789abcdef\n")
        tokens.chmod(0o600)
        with Daemon(DROPKVD, "--token-file", str(tokens)) as daemon:
            url = "http://127.0.0.1:%d" % daemon.port
            self.fails(run("score", "-e", url, DUMP), 77)
            self.fails(run("score", "-e", url, DUMP, DROPKV_TOKEN="wrong"), 77)
            self.ok(run("score", "-e", url, DUMP, DROPKV_TOKEN="0123456789abcdef0123456789abcdef"))


if __name__ == "__main__":
    unittest.main(verbosity=1)

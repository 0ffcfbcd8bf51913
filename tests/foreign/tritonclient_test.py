"""Drives a real daemon with NVIDIA's tritonclient: health, metadata, configuration, statistics, and
inference (sync, async, asyncio; binary and JSON), and compares every answer with dropkv-client's
embedded engine on the same dump.

usage: tritonclient_test.py DROPKVD DROPKV_CLIENT TEST_DATA
"""
import asyncio
import base64
import json
import os
import struct
import subprocess
import sys
import unittest
import urllib.request

import ml_dtypes
import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as triton_shm
from tritonclient.utils import InferenceServerException

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "server"))
from daemon import Daemon  # noqa: E402 (its folder is known only now)

DROPKVD, DROPKV_CLIENT, TEST_DATA = sys.argv[1:4]
DUMP = os.path.join(TEST_DATA, "dumps", "tiny_dump_n1024.safetensors")
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32}


def load(path):
    """All tensors of a safetensors file."""
    with open(path, "rb") as file:
        (head_bytes,) = struct.unpack("<Q", file.read(8))
        head = json.loads(file.read(head_bytes))
        data = file.read()
    head.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in head.items()
    }


class TritonClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(DROPKVD)
        cls.address = f"127.0.0.1:{cls.daemon.port}"
        cls.tensors = load(DUMP)
        report = subprocess.run(
            [DROPKV_CLIENT, "score", "--endpoint", "embedded:", "--format", "json", "--keep-ratio", "0.1", DUMP],
            check=True, stdout=subprocess.PIPE)
        cls.expected = [np.array(block["keep_indices"]) for block in json.loads(report.stdout)["blocks"]]
        cls.layers = len(cls.expected)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.client = triton.InferenceServerClient(self.address, concurrency=4)
        self.addCleanup(self.client.close)

    def inputs(self, layer, dtype=None, binary=True, module=triton):
        made = []
        for name in ("query", "key", "value"):
            array = self.tensors[f"layers.{layer}.{name}"]
            if dtype is not None:
                array = array.astype(dtype)
            datatype = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float32): "FP32"}[array.dtype]
            tensor = module.InferInput(name, list(array.shape), datatype)
            tensor.set_data_from_numpy(array, binary_data=binary)
            made.append(tensor)
        return made

    def test_health_is_good(self):
        self.assertTrue(self.client.is_server_live())
        self.assertTrue(self.client.is_server_ready())
        self.assertTrue(self.client.is_model_ready("dropkv"))
        self.assertTrue(self.client.is_model_ready("dropkv", "1"))
        self.assertFalse(self.client.is_model_ready("no_such_model"))

    def test_metadata_names_inputs_and_outputs(self):
        server = self.client.get_server_metadata()
        self.assertEqual(server["name"], "dropkvd")
        self.assertIn("binary_tensor_data", server["extensions"])
        self.assertIn("statistics", server["extensions"])
        model = self.client.get_model_metadata("dropkv", "1")
        self.assertEqual(model["versions"], ["1"])
        names = {tensor["name"] for tensor in model["inputs"]}
        self.assertTrue({"query", "key", "value"} <= names)
        self.assertEqual({tensor["name"] for tensor in model["outputs"]}, {"keep_indices", "scores"})
        config = self.client.get_model_config("dropkv")
        self.assertTrue({tensor["name"] for tensor in config["input"]} <= names)

    def test_binary_answers_equal_the_embedded_engine(self):
        for layer in range(self.layers):
            result = self.client.infer(
                "dropkv", self.inputs(layer), request_id=f"layer-{layer}", parameters={"keep_ratio": 0.1},
                outputs=[triton.InferRequestedOutput("keep_indices", binary_data=True)])
            np.testing.assert_array_equal(result.as_numpy("keep_indices"), self.expected[layer])
            self.assertEqual(result.get_response()["id"], f"layer-{layer}")

    def test_json_output_equals_binary_output(self):
        result = self.client.infer(
            "dropkv", self.inputs(0), parameters={"keep_ratio": 0.1},
            outputs=[triton.InferRequestedOutput("keep_indices", binary_data=False),
                     triton.InferRequestedOutput("scores", binary_data=False)])
        np.testing.assert_array_equal(result.as_numpy("keep_indices"), self.expected[0])
        binary = self.client.infer(
            "dropkv", self.inputs(0), parameters={"keep_ratio": 0.1},
            outputs=[triton.InferRequestedOutput("scores", binary_data=True)])
        np.testing.assert_allclose(result.as_numpy("scores"), binary.as_numpy("scores"), rtol=1e-6)

    def test_json_numbers_in_equal_binary_in(self):
        answers = [
            self.client.infer("dropkv", self.inputs(1, np.float32, binary), parameters={"keep_ratio": 0.1})
            .as_numpy("keep_indices") for binary in (False, True)
        ]
        np.testing.assert_array_equal(*answers)

    def test_outputs_left_out_means_all(self):
        result = self.client.infer("dropkv", self.inputs(0))
        self.assertEqual(result.as_numpy("scores").shape, (1, 2, 1024))
        self.assertEqual(result.as_numpy("keep_indices").shape, (1, 2, 102))

    def test_async_requests_are_all_answered(self):
        pending = [
            self.client.async_infer("dropkv", self.inputs(layer), parameters={"keep_ratio": 0.1})
            for layer in range(self.layers)
        ]
        for layer, handle in enumerate(pending):
            np.testing.assert_array_equal(handle.get_result().as_numpy("keep_indices"), self.expected[layer])

    def test_asyncio_client_works(self):
        async def ask():
            async with triton_aio.InferenceServerClient(self.address) as client:
                return await asyncio.gather(*[
                    client.infer("dropkv", self.inputs(layer, module=triton_aio), parameters={"keep_ratio": 0.1})
                    for layer in range(self.layers)
                ])
        for layer, result in enumerate(asyncio.run(ask())):
            np.testing.assert_array_equal(result.as_numpy("keep_indices"), self.expected[layer])

    def test_statistics_count_inferences(self):
        before = self.client.get_inference_statistics("dropkv")["model_stats"][0]
        for _ in range(3):
            self.client.infer("dropkv", self.inputs(0))
        after = self.client.get_inference_statistics("dropkv", "1")["model_stats"][0]
        self.assertEqual(after["inference_count"] - before["inference_count"], 3)
        gained = after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"]
        self.assertEqual(gained, 3)
        self.assertGreater(after["inference_stats"]["compute_infer"]["ns"], 0)

    def test_errors_reach_the_client_as_text(self):
        with self.assertRaisesRegex(InferenceServerException, "window"):
            self.client.infer("dropkv", self.inputs(0), parameters={"window": 0})
        with self.assertRaisesRegex(InferenceServerException, "no_such_parameter"):
            self.client.infer("dropkv", self.inputs(0), parameters={"no_such_parameter": 1})
        with self.assertRaises(InferenceServerException) as caught:
            self.client.infer("other", self.inputs(0))
        self.assertIn("unknown model", caught.exception.message())

    def test_compressed_requests_are_refused_by_name(self):
        with self.assertRaisesRegex(InferenceServerException, "(?i)content-encoding"):
            self.client.infer("dropkv", self.inputs(0), request_compression_algorithm="gzip")

    def test_client_shared_memory_is_off(self):
        self.assertEqual(self.client.get_system_shared_memory_status(), [])
        with self.assertRaises(InferenceServerException):
            self.client.register_system_shared_memory("region", "/region", 4096)

    def test_metrics_follow_the_requests(self):
        def total():
            with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=10) as reply:
                text = reply.read().decode()
            return sum(float(line.split()[-1]) for line in text.splitlines()
                       if line.startswith("dropkv_requests_total") and 'outcome="ok"' in line)
        before = total()
        self.client.infer("dropkv", self.inputs(0))
        self.assertEqual(total() - before, 1)


class SharedMemory(unittest.TestCase):
    """The client's own shared memory utilities, with a daemon that takes names."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(DROPKVD, "--allow-client-shm", "true")
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.tensors = load(DUMP)

    def setUp(self):
        self.client = triton.InferenceServerClient(f"127.0.0.1:{self.daemon.port}")
        self.addCleanup(self.client.close)

    def region(self, name, n_bytes):
        handle = triton_shm.create_shared_memory_region(name, f"/dropkv_test_{os.getpid()}_{name}", n_bytes, create_only=True)
        self.addCleanup(triton_shm.destroy_shared_memory_region, handle)
        self.client.register_system_shared_memory(name, f"/dropkv_test_{os.getpid()}_{name}", n_bytes)
        self.addCleanup(self.client.unregister_system_shared_memory, name)
        return handle

    def test_inputs_and_outputs_in_shared_memory(self):
        arrays = [self.tensors[f"layers.0.{name}"] for name in ("query", "key", "value")]
        plain, shared = [], []
        inputs = self.region("inputs", sum(array.nbytes for array in arrays))
        offset = 0
        for name, array in zip(("query", "key", "value"), arrays):
            raw = np.frombuffer(array.tobytes(), np.uint8)
            triton_shm.set_shared_memory_region(inputs, [raw], offset=offset)
            for made in (plain, shared):
                made.append(triton.InferInput(name, list(array.shape), "BF16"))
            plain[-1].set_data_from_numpy(array)
            shared[-1].set_shared_memory("inputs", array.nbytes, offset=offset)
            offset += array.nbytes
        wanted = [triton.InferRequestedOutput(name) for name in ("keep_indices", "scores")]
        expected = self.client.infer("dropkv", plain, outputs=wanted, parameters={"keep_ratio": 0.1})
        keep, scores = expected.as_numpy("keep_indices"), expected.as_numpy("scores")
        result = self.client.infer("dropkv", shared, outputs=wanted, parameters={"keep_ratio": 0.1})
        np.testing.assert_array_equal(result.as_numpy("keep_indices"), keep)

        outputs = self.region("outputs", keep.nbytes + scores.nbytes)
        wanted[0].set_shared_memory("outputs", keep.nbytes)
        wanted[1].set_shared_memory("outputs", scores.nbytes, offset=keep.nbytes)
        result = self.client.infer("dropkv", shared, outputs=wanted, parameters={"keep_ratio": 0.1})
        self.assertEqual(result.get_output("keep_indices")["shape"], list(keep.shape))
        np.testing.assert_array_equal(
            triton_shm.get_contents_as_numpy(outputs, np.int32, list(keep.shape)), keep)
        np.testing.assert_array_equal(
            triton_shm.get_contents_as_numpy(outputs, np.float32, list(scores.shape), offset=keep.nbytes), scores)

        listed = self.client.get_system_shared_memory_status()
        self.assertEqual({r["name"] for r in listed}, {"inputs", "outputs"})
        self.client.unregister_system_shared_memory()
        self.assertEqual(self.client.get_system_shared_memory_status(), [])
        with self.assertRaisesRegex(InferenceServerException, "not registered"):
            self.client.infer("dropkv", shared, parameters={"keep_ratio": 0.1})

    def test_errors_reach_the_client(self):
        self.assertIn("system_shared_memory", self.client.get_server_metadata()["extensions"])
        with self.assertRaisesRegex(InferenceServerException, "no shared memory object"):
            self.client.register_system_shared_memory("nothing", "/dropkv_test_nothing", 64)
        with self.assertRaisesRegex(InferenceServerException, "device_id 0"):
            self.client.register_cuda_shared_memory("gpu", base64.b64encode(b"\xa5" * 64), 0, 4096)
        self.assertEqual(self.client.get_cuda_shared_memory_status(), [])
        self.client.unregister_cuda_shared_memory()
        region = self.region("small", 64)
        self.assertIsNotNone(region)
        with self.assertRaisesRegex(InferenceServerException, "already"):
            self.client.register_system_shared_memory("small", f"/dropkv_test_{os.getpid()}_small", 64)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)

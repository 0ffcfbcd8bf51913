"""GPU memory lent to a daemon: where it is read, and what is refused. Needs one GPU and nobody else on it.

usage: test_gpu_regions.py DROPKVD [unittest arguments]
"""
import os
import random
import struct

from gpu_blocks import ALL_BYTES, DIM, KEEP, KV_BYTES, KV_HEADS, PARAMS, Q_BYTES, Q_HEADS, ROWS, TOKENS, message, numbers
from gpu_case import Case, main
from gpu_exporter import Exporter

import cuda
import wire
from cuda import MIB, CudaError, Vmm
from wire import Client, Memory


class Chunks(Case):
    def vmm(self, chunks, **options):
        vmm = Vmm(self.gpu, chunks, **options)
        self.addCleanup(lambda: vmm.free() if vmm.pointer else None)
        return vmm

    def tearDown(self):
        self.client.socket.close()
        self.doCleanups()
        super().tearDown()

    def test_one_chunk(self):
        vmm = self.vmm([(0, 2 * MIB)])
        self.gpu.write(vmm.pointer, numbers(1), 4096)
        self.assert_answer(self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks), 4096)

    def test_chunks_side_by_side_are_one_stretch(self):
        vmm = self.vmm([(0, 2 * MIB), (2 * MIB, 4 * MIB), (6 * MIB, 6 * MIB)])
        for at in (2 * MIB - 4096, 6 * MIB - Q_BYTES - 256, 12 * MIB - ALL_BYTES):
            self.gpu.write(vmm.pointer, numbers(1), at)
            region = self.add(vmm.fds, n_bytes=12 * MIB - 256, offset=256, kind=3, chunks=vmm.chunks)
            self.assert_answer(region, at - 256)
            self.drop(region)

    def test_what_lies_between_chunks_is_not_read(self):
        vmm = self.vmm([(0, 2 * MIB), (4 * MIB, 2 * MIB)])
        self.gpu.write(vmm.pointer, numbers(1), 4 * MIB)
        region = self.add(vmm.fds, n_bytes=6 * MIB, kind=3, chunks=vmm.chunks)
        self.assert_answer(region, 4 * MIB)
        for at in (2 * MIB - 4096, 2 * MIB, 3 * MIB, 6 * MIB - 4096, 6 * MIB, 1 << 62):
            status, text = self.client.ask(wire.SCORE_BLOCKS, message(region, at)).error()
            self.assertEqual(status, wire.INVALID, text)
        self.assert_answer(region, 4 * MIB)

    def test_lengths_must_be_the_real_ones(self):
        vmm = self.vmm([(0, 4 * MIB)])
        for n_bytes in (2 * MIB, 6 * MIB, 1 << 30):
            self.refuse(wire.INVALID, "chunk 0", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=[(0, n_bytes)])
        self.refuse(wire.INVALID, "chunk 0", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=[(0, 4 * MIB - 1)])
        self.refuse(wire.INVALID, "chunk 0", fds=vmm.fds, n_bytes=MIB, offset=4096, kind=3, chunks=[(4096, 4 * MIB)])
        far = [(0, 4 * MIB), (1 << 41, 4 * MIB)]
        self.refuse(wire.INVALID, "chunk 1", "outside", fds=vmm.fds * 2, n_bytes=MIB, kind=3, chunks=far)
        self.refuse(wire.TOO_LARGE, "span", fds=vmm.fds * 2, n_bytes=(1 << 41) + MIB, kind=3, chunks=far)

    def test_descriptors_of_other_things(self):
        ends = os.pipe()
        fds = [*ends, os.open("/dev/null", os.O_RDWR), wire.new_memfd(bytes(4096)), os.open(os.path.abspath(__file__), os.O_RDONLY)]
        try:
            for fd in fds:
                self.refuse(wire.INVALID, "chunk 0", "cuMemExportToShareableHandle", fds=[fd], n_bytes=MIB, kind=3,
                            chunks=[(0, 2 * MIB)])
        finally:
            for fd in fds:
                os.close(fd)

    def test_host_memory_of_the_driver(self):
        try:
            vmm = self.vmm([(0, 2 * MIB)], location=cuda.HOST_NUMA_LOCATION)
        except CudaError as error:
            self.skipTest("no such memory here: %s" % error)
        self.refuse(wire.INVALID, "not memory of a GPU", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=vmm.chunks)

    def test_another_gpu_and_writable_regions(self):
        vmm = self.vmm([(0, 2 * MIB)])
        self.refuse(wire.UNSUPPORTED, "GPU-01010101-0101", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=vmm.chunks, uuid=b"\1" * 16)
        self.refuse(wire.UNSUPPORTED, "memfd", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=vmm.chunks, writable=1)

    def test_fences_and_outputs_are_host_memory(self):
        vmm = self.vmm([(0, 2 * MIB)])
        self.gpu.write(vmm.pointer, numbers(1))
        region = self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks)
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region, fence=(region, 0, 1))).error()
        self.assertEqual((status, "not a memfd" in text), (wire.INVALID, True))
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region, output=(region, 0, 4096))).error()
        self.assertEqual((status, "not a memfd" in text), (wire.INVALID, True))
        with Memory(ALL_BYTES) as memory:  # with a memfd it works
            fence = self.client.add_memfd(memory.fd, ALL_BYTES, writable=1)
            memory.map[0:8] = struct.pack("<Q", 5)
            answer = self.client.ask(wire.SCORE_BLOCKS, message(region, flags=0, fence=(fence, 0, 5), output=(fence, 64, 4096)))
            kept = answer.keep(memory.map[64:4160])
            self.assertEqual(len(kept[0]), KV_HEADS * KEEP)

    def test_a_cache_and_its_stash_on_the_gpu(self):
        vmm = self.vmm([(0, 2 * MIB)])
        data, row = numbers(1), 4 * DIM
        self.gpu.write(vmm.pointer, data)
        region = self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks)
        stash = self.client.ask(wire.STASH_ADD, wire.stash(region, ROWS, row, row * ROWS)).object()[0]
        views = [wire.view(region, Q_BYTES, row, row * TOKENS), wire.view(region, Q_BYTES + KV_BYTES, row, row * TOKENS)]
        cache = self.client.ask(wire.CACHE_ADD, wire.cache(views, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM)).object()[0]
        answer = self.client.ask(wire.SCORE, wire.score(cache, stash, TOKENS, newest=ROWS - 1, rows=ROWS, params=PARAMS, flags=1))
        answer.keep()
        self.assertEqual(answer.bulk, self.world.answer(self.client, 1))

    def test_rows_around_the_end_of_a_ring_on_the_gpu(self):
        """Both orders of heads and rows; the ring is longer than what is used of it."""
        data, row, ring = numbers(1), 4 * DIM, ROWS + 3
        vmm = self.vmm([(0, 2 * MIB)])
        self.gpu.write(vmm.pointer, data[Q_BYTES:])
        region = self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks)
        views = [wire.view(region, 0, row, row * TOKENS), wire.view(region, KV_BYTES, row, row * TOKENS)]
        cache = self.client.ask(wire.CACHE_ADD, wire.cache(views, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM)).object()[0]
        for row_stride, head_stride in ((row, row * (ring + 2)), (row * (Q_HEADS + 1), row)):
            stash = self.client.ask(wire.STASH_ADD, wire.stash(region, ring, row_stride, head_stride, offset=MIB)).object()[0]
            for newest in (0, 3, ROWS - 2, ROWS - 1, ring - 1):
                rows = bytearray(64 * 1024)
                for head in range(Q_HEADS):
                    for i in range(ROWS):
                        at = (newest + 1 - ROWS + i) % ring * row_stride + head * head_stride
                        source = (head * ROWS + i) * row
                        rows[at : at + row] = data[source : source + row]
                self.gpu.write(vmm.pointer, rows, MIB)
                answer = self.client.ask(wire.SCORE, wire.score(cache, stash, TOKENS, newest=newest, rows=ROWS, params=PARAMS, flags=1))
                answer.keep()
                self.assertEqual(answer.bulk, self.world.answer(self.client, 1), (row_stride, newest))
        stash = self.client.ask(wire.STASH_ADD, wire.stash(region, ring, row * (Q_HEADS + 1), row + 4, offset=MIB)).object()[0]
        status, text = self.client.ask(wire.SCORE, wire.score(cache, stash, TOKENS, newest=0, rows=ROWS, params=PARAMS)).error()
        self.assertEqual((status, "side by side" in text), (wire.UNSUPPORTED, True))

    def test_page_tables_and_pages_on_the_gpu(self):
        page, row = 20, 4 * DIM
        n_pages = TOKENS // page
        vmm = self.vmm([(0, 4 * MIB)])
        data = numbers(1)
        order = random.Random(3).sample(range(1, 2 * n_pages), n_pages)
        page_bytes = KV_HEADS * page * row
        pages = bytearray(2 * n_pages * page_bytes)
        for side in (0, 1):  # [page][head][token]: keys in one half of the region, values in the other
            for i, p in enumerate(order):
                for head in range(KV_HEADS):
                    source = Q_BYTES + side * KV_BYTES + head * row * TOKENS + i * page * row
                    at = p * page_bytes + head * page * row
                    pages[at : at + page * row] = data[source : source + page * row]
            self.gpu.write(vmm.pointer, pages, MIB + side * (3 * MIB // 2))
        self.gpu.write(vmm.pointer, data[:Q_BYTES])
        self.gpu.write(vmm.pointer, struct.pack("<%di" % n_pages, *order), 512 * 1024)
        region = self.add(vmm.fds, n_bytes=4 * MIB, kind=3, chunks=vmm.chunks)
        views = [wire.view(region, 0, row, row * ROWS), wire.view(region, MIB, row, page * row, page_bytes),
                 wire.view(region, MIB + 3 * MIB // 2, row, page * row, page_bytes)]
        block = wire.block(views, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM, rows=ROWS, tokens=TOKENS, page_tokens=page,
                           table=(region, n_pages, 2, 4, 512 * 1024))
        answer = self.client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], PARAMS, 1))
        answer.keep()
        self.assertEqual(answer.bulk, self.world.answer(self.client, 1))
        # An entry that points outside is found where it is read, and costs that block alone.
        self.gpu.write(vmm.pointer, struct.pack("<i", 1 << 20), 512 * 1024 + 8)
        status, text = self.client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], PARAMS, 1)).error()
        self.assertEqual(status, wire.INVALID, text)

    def test_memory_comes_back_as_another_generation(self):
        first = Vmm(self.gpu, [(0, 2 * MIB)])
        self.gpu.write(first.pointer, numbers(1))
        region = self.add(first.fds, n_bytes=2 * MIB, kind=3, chunks=first.chunks)
        self.assert_answer(region)
        self.client.ask(wire.REGION_DETACH, struct.pack("<II", region, 0)).object()
        first.free()
        self.assert_memory_is_back()  # at once: the daemon said so
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region)).error()
        self.assertEqual((status, "detached" in text), (wire.NOT_FOUND, True))
        second = self.vmm([(0, 4 * MIB)])
        self.gpu.write(second.pointer, numbers(2))
        again = wire.region(4 * MIB, kind=3, number=region, generation=0, uuid=self.gpu.uuid, chunks=second.chunks)
        status, text = self.client.ask(wire.REGION_ATTACH, again, fds=second.fds).error()
        self.assertEqual((status, "generation" in text), (wire.INVALID, True))
        again = wire.region(4 * MIB, kind=3, number=region, generation=1, uuid=self.gpu.uuid, chunks=second.chunks)
        self.client.ask(wire.REGION_ATTACH, again, fds=second.fds).object()
        self.assert_answer(region, seed=2)


class Legacy(Case):
    def test_interior_pointers_share_one_mapping(self):
        pointer = self.gpu.alloc(16 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.assertEqual(handle, self.gpu.legacy_handle(pointer + 5 * MIB))
        self.gpu.write(pointer, numbers(1), 5 * MIB)
        self.gpu.write(pointer, numbers(2), 16 * MIB - ALL_BYTES)
        a = self.add(n_bytes=2 * MIB, offset=5 * MIB, kind=2, handle=handle)
        b = self.add(n_bytes=16 * MIB, kind=2, handle=handle)
        self.assert_answer(a)
        self.assert_answer(b, 16 * MIB - ALL_BYTES, seed=2)
        self.drop(a)
        self.assert_answer(b, 5 * MIB)
        self.drop(b)
        self.gpu.free(pointer)
        self.assert_memory_is_back()

    def test_bounds_are_those_of_the_allocation(self):
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.refuse(wire.INVALID, "4194304", n_bytes=4 * MIB + 1, kind=2, handle=handle)
        self.refuse(wire.INVALID, "4194304", n_bytes=1, offset=4 * MIB, kind=2, handle=handle)
        self.refuse(wire.INVALID, "4194304", n_bytes=1, offset=1 << 62, kind=2, handle=handle)
        region = self.add(n_bytes=ALL_BYTES - 4, kind=2, handle=handle)
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region)).error()
        self.assertEqual(status, wire.INVALID, text)
        self.drop(region)
        self.gpu.free(pointer)

    def test_bytes_that_are_no_handle(self):
        for seed in range(20):
            self.refuse(wire.INVALID, "export the allocation again", n_bytes=MIB, kind=2, handle=random.Random(seed).randbytes(64))

    def test_memory_that_was_freed(self):
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.gpu.free(pointer)
        self.refuse(wire.INVALID, "freed", n_bytes=MIB, kind=2, handle=handle)

    def test_a_process_that_has_ended(self):
        with Exporter() as other:
            handle = bytes.fromhex(other.ask(do="legacy", bytes=4 * MIB)[0]["handle"])
        self.refuse(wire.INVALID, "ended", n_bytes=MIB, kind=2, handle=handle)

    def test_two_connections_do_not_share(self):
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.gpu.write(pointer, numbers(1))
        region = self.add(n_bytes=4 * MIB, kind=2, handle=handle)
        with Client(self.world.daemon.path) as second:
            other = self.add(client=second, n_bytes=4 * MIB, kind=2, handle=handle)
            self.assert_answer(other, client=second)
        self.assert_answer(region)
        self.drop(region)
        self.gpu.free(pointer)


if __name__ == "__main__":
    main()

"""The CUDA driver for tests, through ctypes: memory of both kinds, its handles, stream writes.
Standard library only. Every process that imports it and calls open_gpu() has a context of its own."""
import ctypes
import os
import sys
import time

FD_HANDLE, NO_HANDLE = 1, 0
DEVICE_LOCATION, HOST_NUMA_LOCATION = 1, 3
MIB = 1 << 20

_u64, _size, _int = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int


class Location(ctypes.Structure):
    _fields_ = [("type", _int), ("id", _int)]


class Properties(ctypes.Structure):
    _fields_ = [("type", _int), ("handle_types", _int), ("location", Location), ("security", ctypes.c_void_p),
                ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", _int)]


class CudaError(Exception):
    def __init__(self, number, name):
        super().__init__("%s (%d)" % (name, number))
        self.number = number


class Gpu:
    """A device, its primary context current on this thread."""

    def __init__(self, ordinal=0):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, self.context, count = _int(), ctypes.c_void_p(), _int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.ordinal, self.n_gpus = ordinal, count.value
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.enter()
        uuid = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", uuid, device)
        self.uuid = bytes(uuid)

    def enter(self):
        """Makes it the current one, if there are several."""
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        result = getattr(self.lib, name)(*arguments)
        if result != 0:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorName(result, ctypes.byref(text))
            raise CudaError(result, name + ": " + (text.value or b"?").decode())

    def free_bytes(self):
        free, total = _size(), _size()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def write(self, pointer, data, offset=0):
        self.call("cuMemcpyHtoD_v2", _u64(pointer + offset), bytes(data), _size(len(data)))

    def read(self, pointer, n_bytes):
        data = ctypes.create_string_buffer(n_bytes)
        self.call("cuMemcpyDtoH_v2", data, _u64(pointer), _size(n_bytes))
        return data.raw

    def synchronize(self):
        self.call("cuCtxSynchronize")

    # ---- cudaMalloc()'s kind ----

    def alloc(self, n_bytes):
        pointer = _u64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), _size(n_bytes))
        return pointer.value

    def free(self, pointer):
        self.call("cuMemFree_v2", _u64(pointer))

    def legacy_handle(self, pointer):
        handle = (ctypes.c_ubyte * 64)()
        self.call("cuIpcGetMemHandle", handle, _u64(pointer))
        return bytes(handle)

    # ---- cuMemCreate()'s kind ----

    def create(self, n_bytes, handle_types=FD_HANDLE, location=DEVICE_LOCATION):
        memory = _u64()
        place = Location(location, self.ordinal if location == DEVICE_LOCATION else 0)
        properties = Properties(type=1, handle_types=handle_types, location=place)
        self.call("cuMemCreate", ctypes.byref(memory), _size(n_bytes), ctypes.byref(properties), _u64(0))
        return memory.value

    def forget(self, memory):
        self.call("cuMemRelease", _u64(memory))

    def export_fd(self, memory):
        fd = _int(-1)
        self.call("cuMemExportToShareableHandle", ctypes.byref(fd), _u64(memory), FD_HANDLE, _u64(0))
        return fd.value

    # ---- a fence ----

    def stream_write(self, pointer, value):
        self.call("cuStreamWriteValue64_v2", None, _u64(pointer), _u64(value), 0)

    def register_host(self, address, n_bytes):
        pointer = _u64()
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), _size(n_bytes), 2)
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), ctypes.c_void_p(address), 0)
        return pointer.value


class Vmm:
    """Chunks mapped side by side (or with gaps): [(offset, bytes)], with a descriptor each."""

    def __init__(self, gpu, chunks, location=DEVICE_LOCATION, export=True):
        self.gpu, self.chunks = gpu, list(chunks)
        self.bytes = self.chunks[-1][0] + self.chunks[-1][1]
        pointer = _u64()
        gpu.call("cuMemAddressReserve", ctypes.byref(pointer), _size(self.bytes), _size(0), _u64(0), _u64(0))
        self.pointer = pointer.value
        self.fds = []
        access = Access(Location(DEVICE_LOCATION, gpu.ordinal), 3)
        for offset, n_bytes in self.chunks:
            memory = gpu.create(n_bytes, FD_HANDLE if export else NO_HANDLE, location)
            gpu.call("cuMemMap", _u64(self.pointer + offset), _size(n_bytes), _size(0), _u64(memory), _u64(0))
            gpu.call("cuMemSetAccess", _u64(self.pointer + offset), _size(n_bytes), ctypes.byref(access), _size(1))
            if export:
                self.fds.append(gpu.export_fd(memory))
            gpu.forget(memory)

    def close_fds(self):
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def free(self):
        self.close_fds()
        for offset, n_bytes in self.chunks:
            self.gpu.call("cuMemUnmap", _u64(self.pointer + offset), _size(n_bytes))
        self.gpu.call("cuMemAddressFree", _u64(self.pointer), _size(self.bytes))


def open_gpu():
    """The GPU, or the end of the program with a line and 77."""
    try:
        return Gpu()
    except (OSError, CudaError) as error:
        print("skipped: no usable GPU: %s" % error)
        sys.exit(77)


def within(seconds, test):
    """Waits until test() is true; the seconds that took. Nothing else tells when memory of another
    process has been given back."""
    start = time.monotonic()
    while not test():
        if time.monotonic() - start > seconds:
            return None
    return time.monotonic() - start

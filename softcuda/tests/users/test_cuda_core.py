"""Programs on cuda.core (PyPI: cuda-core), one for each part of its public interface that a driver serves: devices,
streams, events, memory, code as PTX (by NVRTC from C++, as text, linked), launches, graphs, textures.

Code is PTX throughout: cubins, which cuda.core's own tests have NVRTC make, hold no code that softcuda can run.
"""

import os

import numpy
import pytest
from cuda.core import (
    Device,
    DeviceMemoryResource,
    EventOptions,
    GraphMemoryResource,
    LaunchConfig,
    LegacyPinnedMemoryResource,
    Linker,
    LinkerOptions,
    ObjectCode,
    Program,
    ProgramOptions,
    StreamOptions,
    VirtualMemoryResource,
    checkpoint,
    launch,
)
from cuda.core.graph import GraphDefinition
from cuda.core.texture import OpaqueArrayOptions, ResourceDescriptor
from cuda.core.utils import StridedMemoryView

COUNT = 1000
SIZE = 4 * COUNT
SOURCE = """
__constant__ unsigned offset;
extern "C" __global__ void scale(unsigned *data, unsigned factor, unsigned count) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        data[at] *= factor;
}
template <typename T> __global__ void add(T *data, T value) {
    extern __shared__ char shared[];
    T *mine = reinterpret_cast<T *>(shared);
    mine[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = mine[threadIdx.x] + value;
}
extern "C" __global__ void read(cudaTextureObject_t texture, float *out) {
    out[threadIdx.x] = tex2D<float>(texture, threadIdx.x + 0.5f, 1.5f);
}
"""
CALLER = """
extern "C" __device__ unsigned twice(unsigned);
extern "C" __global__ void apply(unsigned *data) { data[threadIdx.x] = twice(data[threadIdx.x]); }
"""
CALLED = 'extern "C" __device__ unsigned twice(unsigned value) { return 2 * value; }'


@pytest.fixture
def device():
    device = Device()
    device.set_current()
    yield device
    device.sync()


@pytest.fixture
def stream(device):
    return device.create_stream(options=StreamOptions(nonblocking=True))


@pytest.fixture
def host(device):
    """Memory of the host that the device reaches, and numpy's view of it, which counts up."""
    buffer = LegacyPinnedMemoryResource().allocate(SIZE, stream=device.default_stream)
    device.sync()
    view = numpy.from_dlpack(buffer).view(numpy.uint32)
    view[:] = numpy.arange(COUNT, dtype=numpy.uint32)
    return buffer, view


def compiled(device, source=SOURCE, names=(), **options):
    program = Program(source, "c++", ProgramOptions(std="c++17", arch=f"sm_{device.arch}", **options))
    return program.compile("ptx", name_expressions=names)


def test_a_device_tells_what_it_is(device):
    assert device.name.startswith("softcuda")
    assert device.compute_capability == (8, 0)
    properties = device.properties
    assert (properties.warp_size, properties.max_threads_per_block) == (32, 1024)
    assert properties.unified_addressing and properties.memory_pools_supported
    assert len(device.uuid) == 36 and len(device.pci_bus_id) == 12
    assert Device(0) is device or Device(0) == device


def test_a_device_is_current_in_a_context_of_its_own(device):
    before = device.context
    assert before.handle is not None
    assert device.set_current(before) is not None
    assert int(device.context.handle) == int(before.handle)


def test_streams_have_priorities_and_wait_for_each_other(device):
    first = device.create_stream(options=StreamOptions(priority=-1))
    second = device.create_stream()
    assert first.priority == -1 and first != second
    event = first.record()
    second.wait(event)
    second.wait(first)
    second.sync()
    assert event.is_done
    assert device.default_stream.device.device_id == device.device_id


def test_events_tell_the_time_between_them(device, stream):
    options = EventOptions(timing_enabled=True)
    start, end = (device.create_event(options=options) for _ in range(2))
    stream.record(start)
    stream.record(end)
    end.sync()
    assert 0 <= end - start < 1e5
    plain = stream.record(options=EventOptions(timing_enabled=False))
    plain.sync()
    with pytest.raises(RuntimeError):
        plain - start


def test_memory_is_copied_and_filled(device, stream, host):
    buffer, view = host
    memory = DeviceMemoryResource(device)
    first = memory.allocate(SIZE, stream=stream)
    second = memory.allocate(SIZE, stream=stream)
    assert first.is_device_accessible and not first.is_host_accessible
    first.copy_from(buffer, stream=stream)
    first.copy_to(second, stream=stream)
    first.fill(numpy.uint32(7), stream=stream)
    stream.sync()
    view[:] = 0
    second.copy_to(buffer, stream=stream)
    stream.sync()
    assert (view == numpy.arange(COUNT)).all()
    first.copy_to(buffer, stream=stream)
    stream.sync()
    assert (view == 7).all()
    assert memory.attributes.used_mem_current >= 2 * SIZE
    second.close(stream)
    first.close(stream)


def test_memory_is_mapped_by_virtual_addresses(device, stream, host):
    buffer, view = host
    memory = VirtualMemoryResource(device)
    mapped = memory.allocate(SIZE)
    assert mapped.size >= SIZE
    launch(stream, LaunchConfig(grid=4, block=256), compiled(device).get_kernel("scale"),
           int(buffer.handle), numpy.uint32(3), numpy.uint32(COUNT))
    stream.sync()
    assert (view == 3 * numpy.arange(COUNT)).all()
    mapped.close()


def test_arrays_of_the_host_are_seen_without_a_copy(host):
    buffer, _ = host
    view = StridedMemoryView.from_any_interface(buffer, stream_ptr=-1)
    assert view.ptr == int(buffer.handle) and view.is_device_accessible


def test_kernels_are_compiled_and_launched(device, stream, host):
    buffer, view = host
    code = compiled(device)
    assert code.code_type == "ptx" and b".visible .entry scale" in code.code
    kernel = code.get_kernel("scale")
    assert kernel.attributes.max_threads_per_block == 1024
    assert [(p.offset, p.size) for p in kernel.arguments_info] == [(0, 8), (8, 4), (12, 4)]
    assert kernel.occupancy.max_active_blocks_per_multiprocessor(256, dynamic_shared_memory_size=0) > 0
    launch(stream, LaunchConfig(grid=4, block=256), kernel, buffer, numpy.uint32(5), numpy.uint32(COUNT))
    stream.sync()
    assert (view == 5 * numpy.arange(COUNT)).all()


def test_templates_are_named_by_their_expressions(device, stream, host):
    buffer, view = host
    kernel = compiled(device, names=("add<float>", "add<unsigned>")).get_kernel("add<unsigned>")
    launch(stream, LaunchConfig(grid=1, block=64, shmem_size=256), kernel, buffer, numpy.uint32(9))
    stream.sync()
    assert (view[:64] == numpy.arange(64) + 9).all() and view[64] == 64


def test_ptx_is_loaded_as_text_and_from_a_file(device, stream, host, tmp_path):
    buffer, view = host
    text = compiled(device).code
    file = tmp_path / "scale.ptx"
    file.write_bytes(text)
    for code in (ObjectCode.from_ptx(text), ObjectCode.from_ptx(str(file))):
        launch(stream, LaunchConfig(grid=4, block=256), code.get_kernel("scale"),
               buffer, numpy.uint32(2), numpy.uint32(COUNT))
    stream.sync()
    assert (view == 4 * numpy.arange(COUNT)).all()


def test_what_is_no_code_is_refused(device):
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_PTX"):
        ObjectCode.from_ptx(b".version 8.0\n.target sm_80\n.address_size 64\nnonsense").get_kernel("scale")
    with pytest.raises(Exception, match="CUDA_ERROR_NOT_FOUND"):
        compiled(device).get_kernel("nothing")
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE"):
        kernel = compiled(device).get_kernel("scale")
        launch(device.default_stream, LaunchConfig(grid=1, block=(1024, 2, 1)), kernel, 0, numpy.uint32(0),
               numpy.uint32(0))


def test_pieces_are_linked_by_the_driver(device, stream, host):
    buffer, view = host
    pieces = [compiled(device, source, relocatable_device_code=True) for source in (CALLER, CALLED)]
    linker = Linker(*pieces, options=LinkerOptions(arch=f"sm_{device.arch}"))
    kernel = linker.link("cubin").get_kernel("apply")
    launch(stream, LaunchConfig(grid=1, block=COUNT), kernel, buffer)
    stream.sync()
    assert (view == 2 * numpy.arange(COUNT)).all()


def test_work_is_captured_in_a_graph(device, stream, host):
    buffer, view = host
    kernel = compiled(device).get_kernel("scale")
    builder = device.create_graph_builder().begin_building()
    arguments = (LaunchConfig(grid=4, block=256), kernel, buffer, numpy.uint32(3), numpy.uint32(COUNT))
    launch(builder, *arguments)
    left, right = builder.split(2)
    launch(left, *arguments)
    builder = left.join(left, right)
    seen = []
    builder.callback(lambda: seen.append(int(view[1])))
    graph = builder.end_building().complete()
    graph.upload(stream)
    for _ in range(2):
        graph.launch(stream)
    stream.sync()
    assert (view == 81 * numpy.arange(COUNT)).all() and seen == [9, 81]


def test_graphs_are_made_of_nodes_and_updated(device, stream, host):
    buffer, view = host
    kernel = compiled(device).get_kernel("scale")

    def definition(factor):
        graph = GraphDefinition()
        node = graph.memset(int(buffer.handle), numpy.uint32(2), COUNT)
        node = node.launch(LaunchConfig(grid=4, block=256), kernel, buffer, numpy.uint32(factor),
                           numpy.uint32(COUNT))
        assert len(graph.nodes()) == 2 and len(graph.edges()) == 1
        return graph

    graph = definition(3).instantiate()
    graph.launch(stream)
    stream.sync()
    assert (view == 6).all()
    graph.update(definition(5))
    graph.launch(stream)
    stream.sync()
    assert (view == 10).all()


def test_graphs_have_memory_of_their_own(device, stream, host):
    buffer, view = host
    memory = GraphMemoryResource(device)
    builder = device.create_graph_builder().begin_building()
    own = memory.allocate(SIZE, stream=builder)
    own.copy_from(buffer, stream=builder)
    own.fill(b"\1", stream=builder)
    own.copy_to(buffer, stream=builder)
    own.close(builder)
    graph = builder.end_building().complete()
    graph.launch(stream)
    stream.sync()
    assert (view == 0x01010101).all()
    memory.trim()


def test_textures_are_read(device, stream, host):
    buffer, view = host
    view.view(numpy.float32)[:] = numpy.arange(COUNT)
    array = device.create_opaque_array(OpaqueArrayOptions(shape=(32, 4), format="float32", num_channels=1))
    array.copy_from(buffer, stream=stream)
    texture = device.create_texture_object(resource=ResourceDescriptor.from_opaque_array(array))
    launch(stream, LaunchConfig(grid=1, block=32), compiled(device).get_kernel("read"), numpy.uint64(texture.handle),
           buffer)
    stream.sync()
    assert (view.view(numpy.float32)[:32] == numpy.arange(32, 64)).all()


def test_a_process_is_checkpointed_and_restored(device, stream, host):
    buffer, view = host
    memory = DeviceMemoryResource(device).allocate(SIZE, stream=stream)
    memory.copy_from(buffer, stream=stream)
    stream.sync()
    process = checkpoint.Process(os.getpid())
    process.lock()
    process.checkpoint()
    process.restore()
    process.unlock()
    view[:] = 0
    memory.copy_to(buffer, stream=stream)
    stream.sync()
    assert (view == numpy.arange(COUNT)).all()

//! Calls that do several things at once, and launches whose arguments were set before.

use super::{Arguments, MIB, State};

/// `CUDA_MEMCPY3D_BATCH_OP`: source, destination, extent, order.
type BoxCopy = [u64; 14];

/// An operand of `rows` and `layers` of so many elements.
fn pointer(address: u64, row: u64, layer: u64) -> [u64; 5] {
    [1, address, row, layer, 0]
}

fn array(array: u64, [x, y, z]: [u64; 3]) -> [u64; 5] {
    [2, array, x, y, z]
}

fn box_copy(from: [u64; 5], to: [u64; 5], extent: [u64; 3]) -> BoxCopy {
    let mut copy = [0; 14];
    copy[..5].copy_from_slice(&from);
    copy[5..10].copy_from_slice(&to);
    copy[10..13].copy_from_slice(&extent);
    copy[13] = 1; // in the order of the stream
    copy
}

/// `CUstreamBatchMemOpParams`: kind, address, value, flags.
type Value = [u64; 6];

fn wait_32(address: u64) -> Value {
    [1, address, 0, 0, 0, 0]
}

fn write_32(address: u64) -> Value {
    [2, address, 5, 0, 0, 0]
}

fn wait_64(address: u64) -> Value {
    [4, address, 0, 0, 0, 0]
}

fn write_64(address: u64) -> Value {
    [5, address, 5, 0, 0, 0]
}

const BARRIER: Value = [6, 0, 0, 0, 0, 0];

impl State {
    fn batch(&self, name: &str, copies: &[[u64; 3]], first_version: bool) {
        let column = |at: usize| copies.iter().map(|copy| copy[at]).collect::<Vec<u64>>();
        let (to, from, sizes) = (column(0), column(1), column(2));
        // CUmemcpyAttributes: in the order of the stream, for all of them.
        let (attributes, starts) = ([1u64, 0, 0], [0u64]);
        let lists = [&to, &from, &sizes].map(|list| list.as_ptr() as u64);
        let given = [attributes.as_ptr() as u64, starts.as_ptr() as u64, 1];
        let mut arguments = [&lists[..], &[copies.len() as u64], &given].concat();
        let mut failed = 0u64;
        if first_version {
            arguments.push(&raw mut failed as u64);
        }
        arguments.push(self.stream);
        self.cuda.must(name, &arguments);
    }

    fn batches(&self) {
        let mut host = vec![0u64; 16];
        let host = host.as_mut_ptr() as u64;
        let copies = [
            [self.large + 4096, self.small, 16],
            [self.other, host, 32],
            [host + 64, self.large + 8192, 64],
        ];
        self.batch("cuMemcpyBatchAsync", &copies, true);
        let copies =
            [[self.small + 512, self.large + 16, 8], [self.small + 528, self.large + 32, 8]];
        self.batch("cuMemcpyBatchAsync_v2", &copies, false);
    }

    fn boxes(&self) {
        let (mut wide, mut failed) = (0u64, 0u64);
        // 16 elements of 8 bytes, 4 rows, 2 layers.
        let descriptor = [16u64, 4, 2, 3 | 2 << 32, 0];
        let arguments = [&raw mut wide as u64, descriptor.as_ptr() as u64];
        self.cuda.must("cuArray3DCreate_v2", &arguments);
        // Rows of 32 bytes in layers of three, to dense ones.
        let dense = pointer(self.other, 0, 0);
        let plain = [box_copy(pointer(self.large + 4, 32, 3), dense, [8, 2, 2])];
        let (list, failed) = (plain.as_ptr() as u64, &raw mut failed as u64);
        self.cuda.must("cuMemcpy3DBatchAsync", &[1, list, failed, 0, self.stream]);
        let part = array(wide, [14, 2, 1]);
        let both = [
            box_copy(pointer(self.small, 3, 0), part, [2, 2, 1]),
            box_copy(array(wide, [0; 3]), pointer(self.large + 2 * MIB, 0, 2), [2, 1, 2]),
        ];
        let list = both.as_ptr() as u64;
        self.cuda.must("cuMemcpy3DBatchAsync_v2", &[2, list, 0, self.stream]);
        self.cuda.must("cuStreamSynchronize", &[self.stream]);
        self.cuda.must("cuArrayDestroy", &[wide]);
    }

    fn values(&self, list: &[Value]) {
        let arguments = [self.stream, list.len() as u64, list.as_ptr() as u64, 0];
        self.cuda.must("cuStreamBatchMemOp_v2", &arguments);
    }

    fn node_of_values(&self, list: &[Value]) -> [u64; 4] {
        [self.context, list.len() as u64, list.as_ptr() as u64, 0]
    }

    fn instantiate(&mut self) {
        let out = &raw mut self.executable as u64;
        self.cuda.must("cuGraphInstantiateWithFlags", &[out, self.graph, 0]);
    }

    fn make_graph_of_values(&mut self) {
        self.cuda.must("cuGraphCreate", &[&raw mut self.graph as u64, 0]);
        let list = [write_32(self.other + 16), wait_64(self.small + 8)];
        let given = self.node_of_values(&list);
        let (node, given) = (&raw mut self.node as u64, given.as_ptr() as u64);
        self.cuda.must("cuGraphAddBatchMemOpNode", &[node, self.graph, 0, 0, given]);
        self.instantiate();
    }

    /// A graph whose only node decides whether 64 bytes are filled.
    fn make_conditional_graph(&mut self) {
        self.cuda.must("cuGraphCreate", &[&raw mut self.graph as u64, 0]);
        let mut condition = 0u64;
        let arguments = [&raw mut condition as u64, self.graph, self.context, 1, 1];
        self.cuda.must("cuGraphConditionalHandleCreate", &arguments);
        // CUgraphNodeParams: conditional, an `if` with one body.
        let mut given = [0u64; 32];
        given[0] = 13;
        given[2] = condition;
        given[3] = 1 << 32;
        given[5] = self.context;
        let (node, place) = (&raw mut self.node as u64, given.as_mut_ptr());
        self.cuda.must("cuGraphAddNode", &[node, self.graph, 0, 0, place as u64]);
        // SAFETY: the driver has stored the address of a list with one graph.
        let body = unsafe { *(place.add(4).read_volatile() as *const u64) };
        let mut inner = 0u64;
        let fill: [u64; 5] = [self.other, 0, 7 | 4 << 32, 16, 1];
        let arguments = [&raw mut inner as u64, body, 0, 0, fill.as_ptr() as u64, self.context];
        self.cuda.must("cuGraphAddMemsetNode", &arguments);
        self.instantiate();
    }

    fn capture_values(&mut self) {
        self.cuda.must("cuStreamBeginCapture_v2", &[self.stream, 2]);
        self.values(&[write_64(self.large + 4 * MIB)]);
        self.cuda.must("cuStreamWriteValue32_v2", &[self.stream, self.other, 5, 0]);
        let graph = &raw mut self.graph as u64;
        self.cuda.must("cuStreamEndCapture", &[self.stream, graph]);
        self.instantiate();
    }

    /// By the function for nodes of this kind, or that for nodes of all kinds.
    fn change_graph_of_values(&self, general: bool) {
        let place = if general { self.large + 64 } else { self.small + 32 };
        let list = [write_32(place), wait_64(self.small + 8)];
        let own = self.node_of_values(&list);
        let mut any = [0u64; 32];
        any[0] = 12;
        any[2..6].copy_from_slice(&own);
        let (name, given) = if general {
            ("cuGraphExecNodeSetParams", any.as_ptr())
        } else {
            ("cuGraphExecBatchMemOpNodeSetParams", own.as_ptr())
        };
        self.cuda.must(name, &[self.executable, self.node, given as u64]);
    }

    /// Three launches by the functions of the first versions of CUDA.
    fn legacy(&self) {
        let mut arguments = self.arguments(0);
        let (given, size) = (&raw mut arguments as u64, size_of::<Arguments>() as u64);
        let function = self.function;
        self.cuda.must("cuFuncSetBlockShape", &[function, 1, 1, 1]);
        self.cuda.must("cuParamSetv", &[function, 0, given, size]);
        self.cuda.must("cuParamSetSize", &[function, size]);
        self.cuda.must("cuLaunch", &[function]);
        self.cuda.must("cuLaunchGrid", &[function, 1, 1]);
        self.cuda.must("cuLaunchGridAsync", &[function, 1, 1, self.stream]);
    }

    /// Carries a command out; `false` if it is none of these.
    pub(super) fn obey_batch(&mut self, command: &str) -> bool {
        match command {
            "batches" => self.batches(),
            "boxes" => self.boxes(),
            "values" => {
                let list = [
                    write_32(self.small),
                    write_64(self.other + 8),
                    wait_32(self.small),
                    BARRIER,
                    wait_64(self.large + 8),
                ];
                self.values(&list);
            }
            "write values" => self.values(&[write_64(self.large + 2 * MIB), write_64(self.other)]),
            "make graph of values" => self.make_graph_of_values(),
            "make conditional graph" => self.make_conditional_graph(),
            "capture values" => self.capture_values(),
            "change graph of values" => self.change_graph_of_values(false),
            "change graph of values again" => self.change_graph_of_values(true),
            "legacy" => self.legacy(),
            _ => return false,
        }
        true
    }
}

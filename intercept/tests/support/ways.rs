//! A program that calls the driver's functions as it is told to, whichever way it is to find them.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::BufRead;

use super::support::{Library, say};

const MIB: u64 = 1 << 20;

/// A kernel that writes to the address that is its argument's complement: no look at the argument finds it.
const PTX: &str = "\
.version 8.0
.target sm_70
.address_size 64
.visible .entry stray(.param .u64 hidden)
{
    .reg .b64 %address;
    ld.param.u64 %address, [hidden];
    not.b64 %address, %address;
    st.global.u32 [%address], 1;
    ret;
}
";

type Function =
    unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> u32;

/// Where a function is looked for.
enum Way {
    /// In `libcuda.so.1`, by its symbol.
    Symbol,
    /// By `cuGetProcAddress`, as of this version, with these flags.
    Asked(u64, u64),
    /// In the driver's own library, which is opened by its path.
    Past,
}

struct State {
    cuda: Library,
    driver: Option<Library>,
    /// What arguments may be called.
    named: HashMap<&'static str, u64>,
}

pub(crate) fn run() {
    let mut state =
        State { cuda: Library::open("libcuda.so.1"), driver: None, named: HashMap::new() };
    if std::env::var_os("GPUCR_TEST_DRIVER_FIRST").is_some() {
        state.driver();
    }
    state.set_up();
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let code = state.obey(&line);
        say(&code.to_string());
    }
    std::process::exit(0);
}

/// A place that is never given back.
fn place(value: u64) -> u64 {
    Box::leak(Box::new(value)) as *mut u64 as u64
}

impl State {
    /// The driver's library, opened by its path.
    fn driver(&mut self) -> &Library {
        self.driver.get_or_insert_with(|| {
            let path = std::env::var("GPUCR_TEST_PAST").or_else(|_| std::env::var("GPUCR_DRIVER"));
            Library::open(&path.expect("a driver is named"))
        })
    }

    fn set_up(&mut self) {
        let made = |name: &str, arguments: &[u64]| {
            let out = place(0);
            self.cuda.must(name, &[&[out], arguments].concat());
            // SAFETY: a place of this program's.
            unsafe { (out as *const u64).read() }
        };
        self.cuda.must("cuInit", &[0]);
        let context = made("cuDevicePrimaryCtxRetain", &[0]);
        self.cuda.must("cuCtxSetCurrent", &[context]);
        let text = CString::new(PTX).expect("no NUL");
        let module = made("cuModuleLoadData", &[text.as_ptr() as u64]);
        let function = made("cuModuleGetFunction", &[module, c"stray".as_ptr() as u64]);
        let [from, to] = [(); 2].map(|()| made("cuMemAlloc_v2", &[4 * MIB]));
        self.cuda.must("cuMemsetD32_v2", &[from, 7, MIB]);
        let parameters = place(place(!(from + MIB)));
        self.named = HashMap::from([
            ("stream", made("cuStreamCreate", &[1])),
            ("event", made("cuEventCreate", &[0])),
            ("context", context),
            ("function", function),
            ("from", from),
            ("to", to),
            ("out", place(0)),
            ("parameters", parameters),
        ]);
    }

    fn find(&mut self, name: &str, way: &Way) -> u64 {
        match *way {
            Way::Symbol => self.cuda.symbol(name) as u64,
            Way::Past => self.driver().symbol(name) as u64,
            Way::Asked(version, flags) => {
                let (name, mut found) = (CString::new(name).expect("no NUL"), 0u64);
                let arguments = [name.as_ptr() as u64, &raw mut found as u64, version, flags, 0];
                self.cuda.must("cuGetProcAddress_v2", &arguments);
                found
            }
        }
    }

    fn argument(&self, word: &str) -> u64 {
        self.named.get(word).copied().unwrap_or_else(|| word.parse().expect("a number"))
    }

    /// Calls a function, and gives its code: `WAY NAME ARGUMENT ...`. A way is `symbol`, `past`, or
    /// `asked:VERSION:FLAGS`; with `only` in front of it the function is just looked for.
    fn obey(&mut self, command: &str) -> u32 {
        let mut words = command.split(' ').peekable();
        let only = words.next_if_eq(&"only").is_some();
        let way = match words.next().expect("a way") {
            "symbol" => Way::Symbol,
            "past" => Way::Past,
            asked => {
                let mut parts =
                    asked.split(':').skip(1).map(|part| part.parse().expect("a number"));
                Way::Asked(parts.next().expect("a version"), parts.next().expect("flags"))
            }
        };
        let name = words.next().expect("a function");
        let address = self.find(name, &way);
        let mut a = [0; 12];
        words.zip(&mut a).for_each(|(word, place)| *place = self.argument(word));
        if only {
            return 0;
        }
        // SAFETY: a function of the driver that takes integers; more of them than it takes are left where it
        // does not look. The test sees to it that they are right.
        unsafe {
            let function: Function = std::mem::transmute(address);
            function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11])
        }
    }
}

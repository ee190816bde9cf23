//! What devices are there: models of GPUs, by `SOFTCUDA_DEVICE`.

/// A model of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Model {
    /// What `cuDeviceGetName` gives.
    pub(crate) name: String,
    /// Limits of its compute capability.
    pub(crate) generation: &'static Generation,
    /// Number of multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Memory in bytes.
    pub(crate) memory: u64,
    /// Whether PTX for newer devices is refused. The device that there is without a setting takes it.
    pub(crate) is_strict: bool,
}

/// What devices of a compute capability have, as the CUDA C++ Programming Guide lists it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Generation {
    /// Compute capability, major and minor number.
    pub(crate) capability: (u32, u32),
    /// Threads of a multiprocessor.
    pub(crate) threads: u32,
    /// Blocks of a multiprocessor.
    pub(crate) blocks: u32,
    /// Shared memory of a multiprocessor in bytes.
    pub(crate) shared: usize,
    /// Shared memory of a block at most, in bytes.
    pub(crate) shared_of_block: usize,
    /// How much faster single precision is than double.
    pub(crate) single_to_double: u32,
}

impl Generation {
    /// Whether there are devices of it with an NVLink switch that reduces and copies to several devices.
    pub(crate) fn has_multicast(&self) -> bool {
        matches!(self.capability, (9, 0) | (10, 0) | (10, 3))
    }
}

const fn generation(
    capability: (u32, u32),
    threads: u32,
    blocks: u32,
    shared_kib: usize,
    shared_of_block_kib: usize,
    single_to_double: u32,
) -> Generation {
    Generation {
        capability,
        threads,
        blocks,
        shared: shared_kib << 10,
        shared_of_block: shared_of_block_kib << 10,
        single_to_double,
    }
}

/// By compute capability, as far as driver 580 and later ones have devices.
static GENERATIONS: [Generation; 16] = [
    generation((5, 0), 2048, 32, 64, 48, 32),
    generation((5, 2), 2048, 32, 96, 48, 32),
    generation((6, 0), 2048, 32, 64, 48, 2),
    generation((6, 1), 2048, 32, 96, 48, 32),
    generation((7, 0), 2048, 32, 96, 96, 2),
    generation((7, 5), 1024, 16, 64, 64, 32),
    generation((8, 0), 2048, 32, 164, 163, 2),
    generation((8, 6), 1536, 16, 100, 99, 64),
    generation((8, 7), 1536, 16, 164, 163, 64),
    generation((8, 9), 1536, 24, 100, 99, 64),
    generation((9, 0), 2048, 32, 228, 227, 2),
    generation((10, 0), 2048, 32, 228, 227, 2),
    generation((10, 3), 2048, 32, 228, 227, 64),
    generation((11, 0), 1536, 24, 228, 227, 64),
    generation((12, 0), 1536, 24, 100, 99, 64),
    generation((12, 1), 1536, 24, 100, 99, 64),
];

/// The most multiprocessors and bytes of memory that a model may have: more than any GPU has, and than there are
/// device addresses for.
const MOST_MULTIPROCESSORS: u32 = 1024;
const MOST_MEMORY: u64 = 512 << 30;

impl Model {
    /// The device that there is when nobody says anything: as many multiprocessors as processors that execute blocks.
    pub(crate) fn of_this_machine(memory: u64) -> Model {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        Model {
            name: "softcuda".to_owned(),
            generation: &GENERATIONS[6],
            multiprocessors: (processors as u32).min(MOST_MULTIPROCESSORS),
            memory,
            is_strict: false,
        }
    }

    /// The models of a list: `NAME,CC,SMS,MEMORY`, several separated by `;`. `size` reads sizes of memory.
    ///
    /// # Errors
    /// A sentence that says what is wrong with which of them.
    pub(crate) fn parse_list(
        text: &str,
        size: impl Fn(&str) -> Option<u64>,
    ) -> Result<Vec<Model>, String> {
        let one = |text: &str| {
            Self::parse(text, &size).map_err(|what| {
                format!("SOFTCUDA_DEVICE: {what} in `{text}`, which is to be NAME,CC,SMS,MEMORY")
            })
        };
        text.split(';').map(one).collect()
    }

    fn parse(text: &str, size: impl Fn(&str) -> Option<u64>) -> Result<Model, String> {
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        let &[name, capability, multiprocessors, memory] = &fields[..] else {
            return Err(format!("there are {} fields", fields.len()));
        };
        if name.is_empty() || name.len() > 255 || name.contains(|c: char| c.is_control()) {
            return Err("the name is none".to_owned());
        }
        let numbers = capability.split_once('.').and_then(|(major, minor)| {
            Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
        });
        let mut known = GENERATIONS.iter();
        let generation = known.find(|generation| Some(generation.capability) == numbers);
        let generation = generation.ok_or_else(|| {
            let known =
                GENERATIONS.iter().map(|g| format!("{}.{}", g.capability.0, g.capability.1));
            let known: Vec<String> = known.collect();
            format!("compute capability {capability} is none of {}", known.join(", "))
        })?;
        let multiprocessors = multiprocessors.parse().ok();
        let multiprocessors = multiprocessors.filter(|n| (1..=MOST_MULTIPROCESSORS).contains(n));
        let multiprocessors = multiprocessors
            .ok_or(format!("the number of SMs is not one from 1 to {MOST_MULTIPROCESSORS}"))?;
        let memory = size(memory).filter(|memory| *memory <= MOST_MEMORY);
        let memory = memory.ok_or("the memory is no size such as 80G, up to 512G")?;
        Ok(Model { name: name.to_owned(), generation, multiprocessors, memory, is_strict: true })
    }

    /// What tells this kind of device from others, as a number.
    pub(crate) fn kind(&self) -> u32 {
        let (major, minor) = self.generation.capability;
        let numbers = [major, minor, self.multiprocessors].map(u32::to_le_bytes);
        // FNV-1a.
        let bytes = self.name.bytes().chain(numbers.into_iter().flatten());
        bytes
            .fold(0x811c_9dc5, |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
    }

    /// Compute capability as PTX targets count: 80 for 8.0.
    pub(crate) fn target(&self) -> u32 {
        let (major, minor) = self.generation.capability;
        10 * major + minor
    }

    /// Whether PTX for a target such as `sm_90a` can be compiled for this device: PTX is upwards compatible, unless
    /// it is for one architecture (`a`) or for a family (`f`: one major number from a minor number on).
    pub(crate) fn takes(&self, target: &str) -> bool {
        if !self.is_strict {
            return true;
        }
        let Some(wanted) = number(target) else { return false };
        match target.trim_start_matches("sm_").trim_start_matches(|c: char| c.is_ascii_digit()) {
            "" => wanted <= self.target(),
            "a" => wanted == self.target(),
            "f" => wanted <= self.target() && wanted / 10 == self.target() / 10,
            _ => false,
        }
    }
}

/// The number of a target of PTX: 90 of `sm_90a`.
pub(crate) fn number(target: &str) -> Option<u32> {
    target.strip_prefix("sm_").unwrap_or(target).trim_end_matches(['a', 'f']).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Model>, String> {
        Model::parse_list(text, |text| text.strip_suffix('G')?.parse::<u64>().ok().map(|n| n << 30))
    }

    #[test]
    fn lists_of_models() {
        let models = parse("NVIDIA H100,9.0,132,80G; NVIDIA L4 , 8.9 , 58 , 24G").unwrap();
        assert_eq!(models.len(), 2);
        assert_eq!((&models[0].name[..], models[0].target()), ("NVIDIA H100", 90));
        assert_eq!((models[1].multiprocessors, models[1].memory), (58, 24 << 30));
        assert_eq!(models[1].name, "NVIDIA L4");
        assert_ne!(models[0].kind(), models[1].kind());
        for (text, says) in [
            ("", "1 fields"),
            ("a,9.0,132", "3 fields"),
            ("a,9.0,132,80G,1", "5 fields"),
            ("a,9.0,132,80G;", "1 fields"),
            (",9.0,132,80G", "the name"),
            ("a,9.1,132,80G", "9.1 is none of 5.0, 5.2"),
            ("a,9,132,80G", "9 is none of"),
            ("a,9.0,0,80G", "SMs"),
            ("a,9.0,1025,80G", "SMs"),
            ("a,9.0,132,80X", "memory"),
            ("a,9.0,132,600G", "memory"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains(says) && refused.contains("NAME,CC"), "{text}: {refused}");
        }
    }

    #[test]
    fn targets_of_ptx() {
        let [hopper, blackwell] = ["h,9.0,132,80G", "b,10.3,148,288G"].map(|t| parse(t).unwrap());
        for (target, on_hopper, on_blackwell) in [
            ("sm_20", true, true),
            ("sm_90", true, true),
            ("sm_90a", true, false),
            ("sm_100", false, true),
            ("sm_100a", false, false),
            ("sm_100f", false, true),
            ("sm_103a", false, true),
            ("sm_80a", false, false),
            ("sm_120", false, false),
            ("sm_x", false, false),
        ] {
            assert_eq!(hopper[0].takes(target), on_hopper, "{target}");
            assert_eq!(blackwell[0].takes(target), on_blackwell, "{target}");
        }
        assert!(Model::of_this_machine(1).takes("sm_120a"));
    }

    #[test]
    fn generations_are_sorted() {
        assert!(GENERATIONS.is_sorted_by_key(|generation| generation.capability));
        assert_eq!(Model::of_this_machine(1).target(), 80);
    }
}

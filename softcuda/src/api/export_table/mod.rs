//! `cuGetExportTable`: the driver's private tables of functions, as far as NVIDIA's runtime library (`cudart` 12 and
//! 13) asks for them.
//!
//! NVIDIA documents none of them. What is known of the tables (identifiers, places of functions, arguments) was
//! published by ZLUDA (<https://github.com/vosen/ZLUDA>, `dark_api`); that of the table of tools that `cudart` 13.4 asks
//! for (its 95 places, and the number of a context in the fourth) stands in several public programs that read NVIDIA's
//! driver. A place of a table that nothing is known of
//! holds a function that names table and place in the log and refuses the call; a table that nothing is known of is
//! named and refused.

mod contexts;
mod integrity;
mod local;
mod modules;
mod slots;
mod tools;

use super::arguments::{In, Out};
use crate::settings::settings;
use crate::status::{Code, Outcome};
use slots::{Slot, Table, written};

/// Numbers of tables.
const RUNTIME: usize = 0;
const INTEGRITY: usize = 4;

/// All tables, by their numbers.
static TABLES: [Table; 7] = [
    // What the runtime loads modules by.
    Table::sized::<0x6bd5_fb6c_5bf4_e74a_8987_d939_12fd_9df9>(13)
        .with(1, Slot(modules::module_from_wrapper as *const ()))
        .with(2, Slot(contexts::primary_context as *const ()))
        .with(6, Slot(modules::module_from_wrapper_with_options as *const ()))
        .with(7, Slot(contexts::runtime_notice as *const ()))
        .with(8, Slot(modules::module_from_container as *const ()))
        .with(12, Slot(modules::load_compilers as *const ())),
    // Storage of threads for tools; the runtime only looks whether it is there.
    Table::sized::<0x42d8_5a81_23f6_cb47_8298_f6e7_8a3a_ecdc>(4),
    // By which tools are told of the runtime's calls.
    Table::sized::<0xa094_798c_2e74_2e74_93f2_0800_200c_0a66>(7)
        .with(2, Slot(tools::tools_callbacks as *const ()))
        .with(6, Slot(tools::tools_state as *const ())),
    // What the runtime keeps for each context. This one does not begin with its size.
    Table::plain::<0xc693_336e_1121_df11_a8c3_68f3_55d8_9593>()
        .with(0, Slot(local::local_put as *const ()))
        .with(1, Slot(local::local_delete as *const ()))
        .with(2, Slot(local::local_get as *const ())),
    // By which the runtime checks which driver this is.
    Table::sized::<0xd408_2055_bde6_704b_8d34_ba12_3c66_e1f2>(3)
        .with(1, Slot(integrity::integrity as *const ())),
    // Whether a context is one that the runtime must treat in some other way.
    Table::sized::<0x263e_8860_7cd2_6143_92f6_bbd5_006d_fa7e>(4)
        .with(2, Slot(contexts::context_check as *const ()))
        .with(3, Slot(contexts::process_check as *const ())),
    // What tools ask about contexts. `cudart` 13.4 wants it to be there; no program was seen to call anything of it.
    Table::sized::<0x2131_8c60_9714_3248_8ca6_41ff_7324_c8f2>(95)
        .with(4, Slot(contexts::context_number as *const ())),
];

/// Gives out a table of a driver of this version.
///
/// # Errors
/// `NOT_FOUND` for a table that is not here, `INVALID_VALUE` without a place for the result or an identifier.
pub(super) fn give(driver_version: i32, table: &Out<u64>, id: &In<[u8; 16]>) -> Outcome {
    table.set(0)?;
    let id = u128::from_be_bytes(id.get()?);
    let found = TABLES.iter().find(|known| known.id == id);
    if settings().log && found.is_none() {
        eprintln!("softcuda: table {} is not here", written(id));
    }
    let found = found.ok_or(Code::NOT_FOUND)?;
    let [runtime, own] = [&TABLES[RUNTIME], &TABLES[INTEGRITY]];
    integrity::know(integrity::DriverFacts {
        driver_version,
        addresses: [runtime.address(), own.address(), own.function(1)],
    });
    table.set(found.address())
}

#[cfg(test)]
mod tests {
    use super::slots::SLOTS;
    use super::*;

    /// A place of a table, as a program calls it that knows nothing of its arguments.
    fn call(table: &Table, slot: usize) -> u32 {
        let places = table.address() as *const extern "C" fn() -> u32;
        // SAFETY: the table has that many places, and the test calls those with functions without arguments.
        unsafe { (*places.add(slot))() }
    }

    #[test]
    fn tables_are_found_by_their_identifiers_only() {
        let mut address = 1_u64;
        let place = |address: &mut u64| Out::at_address(std::ptr::from_mut(address) as u64);
        for table in &TABLES {
            let id = table.id.to_be_bytes();
            let id = In::at_address(id.as_ptr() as u64);
            assert_eq!(give(13000, &place(&mut address), &id), Ok(()));
            assert_eq!(address, table.address());
        }
        let other = [0_u8; 16];
        let id = In::at_address(other.as_ptr() as u64);
        assert_eq!(give(13000, &place(&mut address), &id), Err(Code::NOT_FOUND));
        assert_eq!(address, 0);
        assert_eq!(give(13000, &place(&mut address), &In::null()), Err(Code::INVALID_VALUE));
        assert_eq!(give(13000, &Out::at_address(0), &id), Err(Code::INVALID_VALUE));
    }

    #[test]
    fn places_that_nothing_is_known_of_refuse() {
        for (table, slots) in [
            (RUNTIME, &[3, 4, 5, 9, 10, 11, 13, SLOTS - 1][..]),
            (1, &[1, 2, 3]),
            (6, &[1, 2, 3, 5, 51, SLOTS - 1]),
        ] {
            for slot in slots {
                assert_eq!(call(&TABLES[table], *slot), Code::NOT_SUPPORTED.0, "{table} {slot}");
            }
        }
    }

    #[test]
    fn identifiers_are_written_as_others_write_them() {
        assert_eq!(written(TABLES[RUNTIME].id), "6BD5FB6C-5BF4-E74A-8987-D93912FD9DF9");
    }
}

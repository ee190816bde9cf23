//! Prints a module with nothing but a kernel's twins, as a program of which no more than 32 registers are wanted has them. For
//! looking at the machine code that is made of them.

use std::error::Error;

use gpucr_rewrite::{alone, rewrite};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, kernel] = &args[..] else { return Err("usage: twins FILE KERNEL".into()) };
    let failed = |error: gpucr_rewrite::Syntax| error.to_string();
    let text = std::fs::read_to_string(path)?;
    let rewritten = rewrite(&text, |name| name == kernel).map_err(failed)?;
    let is_twin = |name: &str| {
        name == kernel || name.starts_with("gpucr_") && name.ends_with(&format!("_{kernel}"))
    };
    print!("{}", alone(&rewritten.text, is_twin, Some(32)).map_err(failed)?);
    Ok(())
}

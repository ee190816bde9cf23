//! The fuzz target `rewrite` over the corpus of the target `ptx`.

use std::path::Path;

use gpucr_rewrite::hostile::feed;
use softcuda::ptx::Module;

fn loads(text: &str) -> bool {
    Module::load(text).is_ok()
}

#[test]
fn what_a_driver_takes_it_takes_rewritten() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/ptx");
    let mut texts = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus") {
        let bytes = std::fs::read(entry.expect("a file").path()).expect("read");
        let text = String::from_utf8_lossy(&bytes);
        feed(&text, loads);
        // Cut somewhere, and with a line twice.
        for part in 1..8 {
            let cut = (text.len() * part / 8..=text.len()).find(|at| text.is_char_boundary(*at));
            let (first, second) = text.split_at(cut.expect("the end is one"));
            feed(first, loads);
            feed(&format!("{first}\n{}\n{second}", second.lines().next().unwrap_or("")), loads);
        }
        texts += 1;
    }
    assert!(texts > 10, "{texts}");
}

//! Parts of softcuda's README that are made from the code, and kept current by tests.

use std::path::Path;

/// Fails unless the part between `<!-- NAME -->` and `<!-- end of NAME -->` is `new`; with
/// `SOFTCUDA_UPDATE_README` set it writes it instead.
pub(crate) fn check(name: &str, new: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(&path).expect("the README");
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
    let (before, rest) = readme.split_once(&begin).expect("the mark before the part");
    let (old, after) = rest.split_once(&end).expect("the mark after the part");
    if old == new {
        return;
    }
    if std::env::var_os("SOFTCUDA_UPDATE_README").is_some() {
        std::fs::write(&path, format!("{before}{begin}{new}{end}{after}")).expect("the README");
        return;
    }
    panic!(
        "softcuda/README.md is not current ({name}); \
         SOFTCUDA_UPDATE_README=1 cargo test -p softcuda readme writes it"
    );
}

//! How the library is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // `nodelete`: what it has registered for forks is called as long as the process lives.
    for arg in ["-soname,libgpucr.so", "-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{arg}");
    }
}

//! How the library is linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The hooks call each other, and are called by std, here: not what another preloaded library or the program has of the same name.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}

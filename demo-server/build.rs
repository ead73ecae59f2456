//! The folder of libduckdb.so becomes part of the programs' search path, so that they run without LD_LIBRARY_PATH.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DUCKDB_LIB_DIR");
    if std::env::var_os("CARGO_FEATURE_BUNDLED").is_none()
        && let Ok(folder) = std::env::var("DUCKDB_LIB_DIR")
    {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    }
}

//! The Debian package: installed, upgraded and removed in a root of its own.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, binary, finish, show, skip};

#[test]
fn a_package_is_installed_upgraded_and_removed() -> Result<()> {
    if ["dpkg-deb", "dpkg-shlibdeps"]
        .iter()
        .any(|tool| Command::new(tool).arg("--version").output().is_err())
    {
        skip("this machine makes no Debian packages");
        return Ok(());
    }
    let lab = Lab::new();
    let built = binary("gpucr");
    let built = built.parent().context("a folder")?;
    let mut dist = Command::new(binary("xtask"));
    dist.args(["dist", "--built"]).arg(built).arg("--out").arg(lab.path("dist"));
    let output = finish(&mut dist)?;
    ensure!(output.status.success(), "{}", show(&output));
    let packages = std::fs::read_dir(lab.path("dist"))?.map(|entry| Ok(entry?.path()));
    let packages = packages.collect::<std::io::Result<Vec<_>>>()?;
    let package = packages.iter().find(|path| path.extension().is_some_and(|e| e == "deb"));
    let old = package.context("a package")?;
    ensure!(
        packages.iter().any(|path| path.extension().is_some_and(|e| e == "gz")),
        "{packages:?}"
    );

    // The next version, whose shim is another file.
    let script = r#"
        set -e
        dpkg-deb -R "$OLD" tree
        sed -i 's/^Version: .*/&.1/' tree/DEBIAN/control
        echo >> tree/usr/lib/gpucr/libgpucr_intercept.so
        dpkg-deb --root-owner-group -Znone -b tree new.deb
        exec unshare --mount --pid --fork --mount-proc setsid --wait bash "$SCRIPT" "$OLD" new.deb "$WORKLOAD""#;
    let mut test = Command::new("bash");
    test.args(["-c", script]).current_dir(lab.path(".")).env("OLD", old);
    test.env("SCRIPT", concat!(env!("CARGO_MANIFEST_DIR"), "/programs/package.sh"));
    let output = finish(test.env("WORKLOAD", binary("workload")))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success() && said.contains("== all is well"), "{}", show(&output));
    Ok(())
}

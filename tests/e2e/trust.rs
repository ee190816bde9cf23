//! What programs and images say is data: nothing that they name is loaded by gpucr, which is root, and nothing
//! is written where they like.

use std::ffi::CString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, binary, finish, refused, show};
use gpucr_wire::{Connection, GateState, Hello, PROTOCOL_VERSION, Reply, Request};

/// Leaves a trace if it is loaded by anything but `sleep`.
const TELLTALE: &str = r#"
    #include <errno.h>
    #include <fcntl.h>
    #include <string.h>
    __attribute__((constructor)) static void loaded(void) {
        if (strcmp(program_invocation_short_name, "sleep")) creat(TRACE, 0644);
    }
"#;

/// A library under the driver's name that tells whether its code was run.
struct Telltale {
    library: PathBuf,
    trace: PathBuf,
}

impl Telltale {
    fn build(lab: &Lab) -> Result<Self> {
        let (library, trace) = (lab.path("libcuda.so.1"), lab.path("trace"));
        let mut compiler = Command::new("cc");
        compiler.args(["-D_GNU_SOURCE", "-shared", "-fPIC", "-x", "c", "-", "-o"]).arg(&library);
        compiler.arg(format!("-DTRACE=\"{}\"", trace.display()));
        let mut compiler = compiler.stdin(Stdio::piped()).spawn()?;
        compiler.stdin.take().context("a pipe")?.write_all(TELLTALE.as_bytes())?;
        ensure!(compiler.wait()?.success(), "cc");
        let telltale = Self { library, trace };
        telltale.works()?;
        Ok(telltale)
    }

    /// It does leave a trace where it is loaded.
    fn works(&self) -> Result<()> {
        let loaded = Command::new("true").env("LD_PRELOAD", &self.library).status()?;
        ensure!(loaded.success() && self.trace.is_file(), "the telltale library tells nothing");
        Ok(std::fs::remove_file(&self.trace)?)
    }

    fn was_not_loaded(&self) -> Result<()> {
        ensure!(!self.trace.exists(), "its code was run");
        Ok(())
    }

    /// A process that has it mapped, and never heard of CUDA.
    fn mapped_by_sleep(&self, lab: &Lab) -> Result<Program> {
        let mut command = Command::new("sleep");
        command.arg("1000").env("LD_PRELOAD", &self.library);
        let program = lab.spawn(command, "sleep.log")?;
        self.await_mapping(program.pid)?;
        Ok(program)
    }

    fn await_mapping(&self, pid: u32) -> Result<()> {
        let name = self.library.to_str().context("a name in UTF-8")?;
        let maps = || std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        gpucr_tests::until("the library is mapped", || maps().contains(name))
    }
}

#[test]
fn a_library_that_a_process_maps_is_not_loaded() -> Result<()> {
    let lab = Lab::new();
    let telltale = Telltale::build(&lab)?;
    let mut sleep = telltale.mapped_by_sleep(&lab)?;
    let pid = sleep.pid.to_string();
    let name = telltale.library.to_str().context("a name in UTF-8")?;
    let words = ["not one of this host's", "Nothing was changed", "GPUCR_HOST_DRIVER", name];
    refused(&lab.run(["dump", "--pid", &pid, "-o", "image"])?, 1, &words)?;
    refused(&lab.run(["trace", "--pid", &pid])?, 1, &["neither process"])?;
    ensure!(lab.run(["ps"])?.status.success());
    telltale.was_not_loaded()?;
    // A user that vouches for it gets what it does.
    let args = ["dump", "--pid", &pid, "-o", "image"];
    finish(lab.gpucr().args(args).env("GPUCR_HOST_DRIVER", &telltale.library))?;
    ensure!(telltale.trace.exists(), "it was vouched for and not loaded");
    ensure!(sleep.is_running());
    Ok(())
}

#[test]
fn a_library_that_a_child_maps_is_not_loaded() -> Result<()> {
    let lab = Lab::new();
    let telltale = Telltale::build(&lab)?;
    let mut command = lab.gpucr();
    let script = "LD_PRELOAD=$0 sleep 1000 & exec \"$@\"";
    command.args(["run", "--device", "soft", "--", "sh", "-c", script]).arg(&telltale.library);
    command.arg(binary("workload")).args(["sgd", "--step-delay-ms", "20"]);
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    let children = format!("/proc/{0}/task/{0}/children", program.pid);
    let child = std::fs::read_to_string(children)?.trim().parse()?;
    telltale.await_mapping(child)?;
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    let says = format!("process {child} uses the driver library");
    refused(&output, 1, &[&says, "Nothing was changed"])?;
    telltale.was_not_loaded()?;
    program.wait_for_progress()
}

/// Run as a program of its own by the test below: it speaks as an agent, and names a driver of its choice.
#[test]
#[ignore = "a helper process of another test"]
fn an_agent_of_a_strangers_making() -> Result<()> {
    let library = std::env::var("TELLTALE")?;
    let file = std::fs::File::open(&library)?;
    // SAFETY: a fresh mapping at an address of the kernel's choice, which nobody looks at.
    let mapped = unsafe {
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
        rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, flags, &file, 0)
    };
    mapped?;
    let pid = std::process::id();
    let namespace = gpucr_wire::pid_namespace(pid).context("a pid namespace")?;
    let name = gpucr_wire::agent_socket(namespace, pid);
    let address =
        <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(
            name,
        )?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    println!("listening");
    for stream in listener.incoming() {
        let mut connection = Connection::new(stream?);
        while let Ok(request) = connection.receive::<Request>() {
            let reply = match request {
                Request::Hello { .. } => Reply::Hello {
                    hello: Hello {
                        protocol: PROTOCOL_VERSION,
                        pid,
                        shim: library.clone(),
                        driver: library.clone(),
                        driver_version: 13000,
                        gate: GateState::Open {},
                    },
                },
                Request::Counts {} => Reply::Counts { counts: gpucr_wire::Counts::default() },
                _ => Reply::Done {},
            };
            connection.send(&reply)?;
        }
    }
    Ok(())
}

#[test]
fn a_driver_that_an_agent_names_is_not_loaded() -> Result<()> {
    let lab = Lab::new();
    let telltale = Telltale::build(&lab)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--ignored", "--exact", "--nocapture", "an_agent_of_a_strangers_making"]);
    command.env("TELLTALE", &telltale.library);
    let mut agent = lab.spawn(command, "agent.log")?;
    gpucr_tests::until("the agent listens", || agent.output().contains("listening"))?;
    let pid = agent.pid.to_string();
    let words = ["not one of this host's", "GPUCR_HOST_DRIVER"];
    for args in [
        &["dump", "-o", "image", "--pid"][..],
        &["trace", "--no-observe", "--pid"],
        &["trace", "--pid"],
    ] {
        refused(&lab.run(args.iter().chain([&pid.as_str()]))?, 1, &words)?;
        telltale.was_not_loaded()?;
    }
    ensure!(lab.run(["ps"])?.status.success());
    telltale.was_not_loaded()?;
    ensure!(agent.is_running());
    Ok(())
}

#[test]
fn a_driver_of_another_build_is_taken_from_a_user_who_vouches_for_it() -> Result<()> {
    let lab = Lab::new();
    let library = lab.path("libcuda.so.1");
    std::fs::copy(binary("libsoftcuda.so"), &library)?;
    // Another file, which loads all the same.
    std::fs::File::options().append(true).open(&library)?.write_all(&[0])?;
    let mut command = Command::new(binary("workload"));
    command.args(["sgd", "--step-delay-ms", "20"]).env("LD_LIBRARY_PATH", lab.path(""));
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    let args = ["dump", "--leave-running", "--pid", &program.pid.to_string(), "-o", "image"];
    refused(&lab.run(args)?, 1, &["not one of this host's", "Nothing was changed"])?;
    let output = finish(lab.gpucr().args(args).env("GPUCR_HOST_DRIVER", &library))?;
    ensure!(output.status.success(), "{}", show(&output));
    program.wait_for_progress()
}

/// An image of a program that has ended.
fn image(lab: &Lab) -> Result<PathBuf> {
    let program = lab.at_work("sgd", &["--steps", "60"])?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    Ok(image)
}

fn hash_of(path: &Path) -> Result<[u8; 32]> {
    Ok(*blake3::hash(&std::fs::read(path)?).as_bytes())
}

#[test]
fn a_driver_that_an_image_names_is_not_loaded() -> Result<()> {
    let lab = Lab::new();
    let image = image(&lab)?;
    let telltale = Telltale::build(&lab)?;
    let hash = hash_of(&telltale.library)?;
    gpucr_core::hostile::forge(&image, |manifest| {
        manifest.driver.path = telltale.library.clone();
        manifest.driver.file_hash = hash;
        manifest.carried.clear();
    });
    let commands = [
        &["restore", "image"][..],
        &["restore", "--on-demand", "image"],
        &["restore", "--share", "image"],
        &["restore", "--new-pids", "image"],
    ];
    for args in commands {
        refused(&lab.run(args)?, 3, &["no driver of that build", "Nothing was changed"])?;
        telltale.was_not_loaded()?;
    }
    // Kept in memory it can be; nobody loads it onto a device.
    let warm = lab.run(["warm", "image"])?;
    lab.run(["warm", "--drop", "image"])?;
    ensure!(warm.status.success(), "{}", show(&warm));
    let said = String::from_utf8_lossy(&warm.stderr).into_owned();
    ensure!(said.contains("not pinned") && said.contains("no driver of that build"), "{said}");
    telltale.was_not_loaded()?;
    Ok(())
}

#[test]
fn only_a_driver_of_this_host_is_put_in_place_as_one() -> Result<()> {
    let lab = Lab::new();
    let image = image(&lab)?;
    let root = gpucr_core::library::library_root();
    let carried = gpucr_core::image::ImageReader::open(&image)?.manifest().carried.clone();
    let shim = &carried.last().context("a shim")?.path;
    // If it were taken for a software driver it would be loaded by the next gpucr.
    let place = gpucr_core::library::place_of("soft", &hash_of(shim)?, &root);
    gpucr_core::hostile::forge(&image, |manifest| {
        manifest.carried.last_mut().expect("a shim").path = place.clone();
    });
    let output = lab.run(["restore", "image"])?;
    refused(&output, 1, &["puts libraries back only below /var/lib/gpucr", "Nothing was changed"])?;
    ensure!(!place.parent().context("a directory")?.exists(), "{} was made", place.display());
    Ok(())
}

#[test]
fn an_image_writes_nothing_anywhere_else() -> Result<()> {
    let lab = Lab::new();
    let image = image(&lab)?;
    let victim = lab.path("victim");
    std::fs::create_dir(&victim)?;
    let carried = gpucr_core::image::ImageReader::open(&image)?.manifest().carried.clone();
    ensure!(carried.len() == 2, "the shim and the software driver");
    for (number, file) in carried.iter().enumerate() {
        // The name is that of its own hash, as at home.
        let home = file.path.parent().and_then(Path::parent).context("two directories")?;
        let below_home = file.path.strip_prefix(home)?;
        let elsewhere = [
            victim.join(below_home),
            victim.join("deeper").join(below_home),
            home.join("../gpucr/../../..").join(victim.strip_prefix("/")?).join(below_home),
            victim.join("libcuda.so.1"),
        ];
        for path in elsewhere {
            gpucr_core::hostile::forge(&image, |manifest| {
                manifest.carried[number].path = path.clone()
            });
            let output = lab.run(["restore", "image"])?;
            refused(&output, 1, &["puts libraries back only below", "Nothing was changed"])?;
            ensure!(
                victim.read_dir()?.next().is_none(),
                "something was made for {}",
                path.display()
            );
        }
        gpucr_core::hostile::forge(&image, |manifest| {
            manifest.carried[number].path = file.path.clone()
        });
    }
    Ok(())
}

#[test]
fn a_link_on_the_way_to_a_library_is_not_followed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (root, victim) = (dir.path().join("root"), dir.path().join("victim"));
    std::fs::create_dir(&victim)?;
    let bytes = b"a library";
    let place = gpucr_core::library::place_of("shim", blake3::hash(bytes).as_bytes(), &root);
    let install = || {
        gpucr_core::library::put_back(
            &place,
            bytes,
            &root,
            &gpucr_core::file_tree::FileTree::host(),
        )
    };
    // The directory of all, that of this library, and the file itself.
    std::os::unix::fs::symlink(&victim, &root)?;
    ensure!(install().is_err());
    std::fs::remove_file(&root)?;
    std::fs::create_dir(&root)?;
    let own = place.parent().context("a directory")?;
    std::os::unix::fs::symlink(&victim, own)?;
    ensure!(install().is_err());
    std::fs::remove_file(own)?;
    std::fs::create_dir(own)?;
    let target = victim.join("target");
    std::fs::write(&target, bytes)?;
    std::os::unix::fs::symlink(&target, &place)?;
    install()?;
    ensure!(!place.is_symlink() && std::fs::read(&place)? == bytes);
    // A directory that others can write is not used either.
    let others = CString::new(own.as_os_str().as_encoded_bytes())?;
    // SAFETY: a path, and a mode.
    ensure!(unsafe { libc::chmod(others.as_ptr(), 0o777) } == 0);
    ensure!(install().is_err());
    ensure!(victim.read_dir()?.count() == 1, "something else was made there");
    Ok(())
}

#[test]
fn an_image_is_taken_by_its_identity_or_signature() -> Result<()> {
    let lab = Lab::new();
    for name in ["key", "other"] {
        let output = lab.run(["key", name])?;
        ensure!(output.status.success() && lab.path(name).is_file(), "{}", show(&output));
    }
    let program = lab.at_work("sgd", &["--steps", "60"])?;
    let report = lab.dump(&program, &lab.path("image"), &["--sign", "key"])?;
    let id = report["id"].as_str().context("an identity")?.to_owned();
    let wrong = id.chars().rev().collect::<String>();

    // Also through a tar, which carries the signature.
    for args in [&["export", "image", "tar"][..], &["export", "image", "other.tar"]] {
        ensure!(lab.run(args)?.status.success());
    }
    let refusals = [
        (&["--expect-id", &wrong][..], "was expected"),
        (&["--trusted-key", "other.pub"], "has signed the image"),
        (&["--trusted-key", "key"], "holds no public key"),
    ];
    let commands: [&[&str]; 6] = [
        &["restore", "image"],
        &["restore", "--new-pids", "image"],
        &["restore", "--on-demand", "image"],
        &["warm", "image"],
        &["verify", "image"],
        &["import", "tar", "-o", "copy"],
    ];
    for command in commands {
        for (options, words) in &refusals {
            let output = lab.run([command, options].concat())?;
            refused(&output, 1, &[words])?;
        }
    }
    ensure!(!lab.path("copy").exists());
    let trusting = ["--expect-id", &id, "--trusted-key", "key.pub"];
    for command in [&["verify", "image"][..], &["import", "tar", "-o", "copy"], &["verify", "copy"]]
    {
        let output = lab.run([command, &trusting].concat())?;
        ensure!(output.status.success(), "{command:?}: {}", show(&output));
    }
    // What was signed is this image, not another one with its signature.
    std::fs::remove_file(lab.path("copy/signatures"))?;
    refused(&lab.run(["verify", "copy", "--trusted-key", "key.pub"])?, 1, &["is not signed"])?;
    gpucr_core::hostile::forge(&lab.path("image"), |manifest| manifest.hostname.push('x'));
    let output = lab.run(["restore", "image", "--trusted-key", "key.pub"])?;
    refused(&output, 1, &["signatures of the image are damaged", "Nothing was changed"])?;
    Ok(())
}

#[test]
fn the_administrator_decides_whose_images_are_taken() -> Result<()> {
    let lab = Lab::new();
    ensure!(lab.run(["key", "key"])?.status.success());
    let program = lab.at_work("sgd", &["--steps", "60"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    ensure!(lab.run(["export", "image", "tar"])?.status.success());
    // An /etc with a policy, for this command alone.
    let policy = lab.path("etc/gpucr");
    std::fs::create_dir_all(&policy)?;
    let under_policy = |args: &str| -> Result<_> {
        let script =
            format!("mount -t overlay overlay -o lowerdir=\"$0\":/etc /etc && exec \"$1\" {args}");
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).arg(lab.path("etc")).arg(binary("gpucr"));
        finish(command.current_dir(lab.path("")).stdin(Stdio::null()))
    };
    for keys in ["", "no key"] {
        std::fs::write(policy.join("trusted-keys"), keys)?;
        let output = under_policy("restore image")?;
        refused(&output, 1, &["/etc/gpucr/trusted-keys holds no public key"])?;
    }
    std::fs::copy(lab.path("key.pub"), policy.join("trusted-keys"))?;
    for args in ["restore image", "restore --new-pids image", "warm image", "import tar -o copy"] {
        refused(
            &under_policy(args)?,
            1,
            &["is not signed, but /etc/gpucr/trusted-keys requires that"],
        )?;
    }
    ensure!(!lab.path("copy").exists());
    ensure!(under_policy("verify image")?.status.success());
    Ok(())
}

//! What to do about an error, where something can be said.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use gpucr_core::Error;
use gpucr_core::container::ContainerError;
use gpucr_core::criu::{CriuError, Hint};
use gpucr_core::cuda::driver::code;
use gpucr_core::extract::ExtractError;
use gpucr_core::image::{ImageError, Manifest, NOT_EMPTY};
use gpucr_core::library::LibraryError;
use gpucr_core::limits::TooFewDescriptors;
use gpucr_core::migrate::LinkError;
use gpucr_core::namespace::EntryError;
use gpucr_core::process::held::{IO_URING, OPENED_OUTSIDE, SYSTEM_V};
use gpucr_core::process::{AgentError, TreeError};
use gpucr_core::store::StoreError;
use gpucr_core::transfer::TarError;
use gpucr_core::trust::TrustError;

use crate::escape::shell_word;

type Help = Option<Cow<'static, str>>;

const DAMAGED: &str = "`gpucr verify` lists everything that is damaged, and what it belongs to";

/// What to do about a program that has opened `/dev/tty`.
const WITHOUT_TERMINAL: &str = "the program has opened /dev/tty itself, for example to ask for a password or to \
draw a progress bar: have it close that, or start it without a controlling terminal: setsid gpucr run -- COMMAND";

/// What to do about a program that uses System V shared memory.
const WITHOUT_SEGMENTS: &str = "CRIU saves System V shared memory only with a whole IPC namespace: start the program in one \
                                of its own (unshare --ipc gpucr run -- COMMAND; in a container: start that without \
                                --ipc=host, and dump it from outside), or have it use POSIX shared memory (shm_open)";
/// What to do about a file that was opened in another mount namespace.
const OPENED_INSIDE: &str = "the program has a file open that was opened outside of its mount namespace, such as the \
standard streams of `unshare -m`, or the standard input of `podman exec -d`: open them inside (sh -c 'exec gpucr run \
-- COMMAND < /dev/null > log 2>&1'; of podman's only the input), or use pipes (podman exec -d -i)";
/// What to do about a program that uses io_uring. (libuv's `UV_USE_IO_URING=0` does not keep it from that since its 1.50.)
const WITHOUT_IO_URING: &str = "CRIU cannot save it: have the program use none. Libraries such as libuv (Node.js, uvloop) \
work without it if the kernel refuses it, which it then does to all programs of the host: sysctl \
kernel.io_uring_disabled=2 before the program starts (Linux 6.6). \
PyTorch's key-value store does with USE_LIBUV=0";

/// The image that a command restores.
static IMAGE: OnceLock<PathBuf> = OnceLock::new();

/// From now on, commands of which help speaks restore this image.
pub(crate) fn set_image(path: &Path) {
    // It is the first that was named.
    let _ = IMAGE.set(path.to_owned());
}

/// A command that restores the image with more options.
fn restore(options: &str) -> String {
    let image = IMAGE.get().map_or_else(|| "IMAGE".to_owned(), |path| shell_word(path));
    ["gpucr restore", options, &image]
        .into_iter()
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// What to do about a program that had a terminal, where a restore has none.
pub(crate) fn for_terminal() -> String {
    let command = shell_word(Path::new(&restore("")));
    format!(
        "restore it in a terminal, without --new-pids and --root, or under script(1): script -qec {command} \
         /dev/null; a program whose streams are all files or pipes needs none"
    )
}

/// What to do about any error.
pub(super) fn about(error: &Error) -> Help {
    match error {
        Error::Agent(error) => about_agent(error),
        Error::Criu(error) => about_criu(error),
        Error::Trust(error) => about_trust(error),
        Error::Library(error) => about_library(error),
        Error::OpenFiles(error) => Some(about_open_files(error).into()),
        Error::Image(error) => about_image(error),
        Error::Store(StoreError::DamagedChunk { .. }) => Some(DAMAGED.into()),
        Error::Tar(error) => about_tar(error),
        Error::Link(error) => about_link(error),
        Error::Extract(error) => about_extract(error),
        error => {
            let about = about_program(error).or_else(|| about_host(error));
            about.or_else(|| about_restore(error)).or_else(|| about_warm_image(error))
        }
    }
}

/// What to do about the other side of a migration.
fn about_link(error: &LinkError) -> Help {
    let text = match error {
        LinkError::Mute => {
            "the output above may say why; if `gpucr` is not on the PATH that ssh commands have there, name its \
            path or command: --remote-gpucr 'sudo gpucr'"
        }
        LinkError::NoStream(..) => {
            "--streams-to names the other host as it is reached from here; if a firewall lets only one port \
            through, name that port with `gpucr migrate --streams-at [::]:PORT` (with ssh) or with `gpucr \
            receive --streams-at` there"
        }
        LinkError::NotGpucr(_) => {
            "a login script there may print something, which it must not do for ssh commands: `ssh HOST true` \
            has to print nothing"
        }
        _ => return None,
    };
    Some(text.into())
}

/// What to do about a program that cannot be dumped as it is.
fn about_program(error: &Error) -> Help {
    let text = match error {
        Error::NoCuda { .. } => {
            "gpucr sees a program once it has called cuInit; for programs without CUDA use `criu dump`"
        }
        Error::NoAgent { .. } => {
            "start the program with `gpucr run`; gpucr sees it once it has called cuInit (see gpucr ps)"
        }
        Error::Busy { .. } | Error::Detached { .. } => {
            "try again when the other gpucr, or the watchdog that it left behind, has ended"
        }
        Error::NotObserved { .. } => {
            "gpucr needs a context of its own on the device, which takes some memory there, and a compute mode \
            that allows more than one process"
        }
        Error::SeveralProcesses { .. } => "name one of them: `gpucr ps` lists them",
        Error::OtherUsers { .. } => {
            "start the program without a user namespace (podman and docker: as root)"
        }
        Error::OtherUser { .. } => {
            "run gpucr as root with all capabilities, which containers and services often lack"
        }
        Error::OtherNetwork { .. } => {
            "all processes of a program have to be in one network namespace, whichever that is: dump each part with a --pid \
             of its own"
        }
        Error::OtherNamespace { .. } => {
            "CRIU cannot save it: start the whole program in that namespace (`unshare` before `gpucr run`), or dump \
             each part with a --pid of its own"
        }
        Error::OtherMounts { .. } => {
            "all processes of a program in a container have to see the same mounts: dump each part with a --pid of its own"
        }
        Error::FirstOfContainer { .. } => {
            "if it is `gpucr run`, name its child, which `gpucr ps` outside of the container lists; else start the \
             program below a process that gpucr can leave out: with `gpucr run` as the container's entry point, or \
             `podman run --init` (docker too)"
        }
        Error::ContainerStays { .. } => {
            "dump it, and restore the image at the other host: gpucr restore --root DIR IMAGE"
        }
        Error::NoRoot => {
            let command = restore("--root DIR");
            return Some(
                format!("name a directory that has the container's files: {command}").into(),
            );
        }
        Error::NoContainer => "leave --root and --mount out",
        Error::Container(ContainerError::Lacking { place, .. }) => {
            let place = shell_word(place);
            return Some(
                format!("mount it there below the root, or name what is to be there: --mount {place}=PATH").into(),
            );
        }
        Error::Container(ContainerError::NoPoint {
            place, is_directory, is_missing: true, ..
        }) => {
            let make = if *is_directory { "mkdir -p" } else { "touch" };
            return Some(
                format!(
                    "make it there, as container runtimes do (`podman init` before `podman mount`): {make} DIR{}",
                    shell_word(place)
                )
                .into(),
            );
        }
        Error::Container(ContainerError::NoPoint { .. }) => {
            "look at the directory that --root names: it is not as the container's was"
        }
        Error::Container(ContainerError::NoSuchMount { .. }) => {
            "`gpucr inspect` lists the places at which something was mounted"
        }
        Error::Container(ContainerError::OwnMounts { pid }) => {
            return Some(
                format!(
                    "run gpucr with the same mounts: nsenter --target {pid} --mount gpucr dump --pid {pid} -o IMAGE"
                )
                .into(),
            );
        }
        Error::Container(ContainerError::Overmounted { .. }) => {
            "unmount one of the two in the container, or do not mount both: a restore can name only what is seen"
        }
        Error::Container(ContainerError::Deleted { .. }) => {
            "mount it anew: what a restore mounts in its place has to be there"
        }
        Error::Container(ContainerError::ThroughProc { .. }) => {
            "name the directory by a path outside of /proc, such as what `podman mount` prints (for docker, `MergedDir` of \
             `docker inspect`)"
        }
        Error::Container(ContainerError::OtherRoot { .. }) => {
            "the image was altered, or made by something else: use one that gpucr has made"
        }
        Error::Container(ContainerError::Chrooted { .. }) => {
            "gpucr saves programs from outside whose root was changed by pivot_root(2), as container runtimes do; after \
             chroot(2), run a gpucr that is installed below that root"
        }
        Error::Entry(EntryError::MayTrace { .. }) => {
            "start the container without that capability (--cap-drop SYS_PTRACE), or run a gpucr that is installed in it"
        }
        Error::Entry(EntryError::Unknown { .. }) => {
            "run gpucr as root with all capabilities, or try again"
        }
        Error::Entry(EntryError::Restless { .. }) => {
            "try again when the container is less busy, or run a gpucr that is installed in it"
        }
        Error::Network(_) => {
            "name one as `ip netns add NAME` makes it, /run/netns/NAME, or that of a process, /proc/PID/ns/net"
        }
        Error::NoLoopback { of: Some(pid) } => {
            return Some(
                format!("bring it up: nsenter --target {pid} --net ip link set lo up").into(),
            );
        }
        Error::NoLoopback { of: None } => "bring it up: ip -n NAME link set lo up",
        Error::UnnamedTerminal { .. } => WITHOUT_TERMINAL,
        Error::Held { what, .. } if what == IO_URING => WITHOUT_IO_URING,
        Error::Held { what, .. } if what.starts_with(SYSTEM_V) => WITHOUT_SEGMENTS,
        Error::Held { what, .. } if what.contains(OPENED_OUTSIDE) => OPENED_INSIDE,
        Error::Held { options: [], .. } => "CRIU cannot save it: have the program close it first",
        Error::Held { options, .. } => {
            return Some(format!("dump it with {}", options.join(" or ")).into());
        }
        Error::Suspended { pid } => {
            return Some(format!("let it run first: kill -CONT {pid}").into());
        }
        Error::Headless { .. } => {
            "CRIU cannot save it; let the main thread wait for the others instead (pthread_join)"
        }
        Error::OtherPidNamespace { inner, .. } => {
            return Some(
                format!(
                    "run a gpucr that is installed in the container: podman exec CONTAINER gpucr dump --pid {inner} \
                     -o IMAGE (or docker exec; the container has to be privileged)"
                )
                .into(),
            );
        }
        Error::OuterSession { .. } => {
            "CRIU cannot save it; start the program in a session of its own: setsid gpucr run -- COMMAND"
        }
        Error::Changed { .. } => "try again",
        Error::OwnTree { .. } => "dump the program itself, not the shell or job that runs gpucr",
        Error::Tree(TreeError::NoProcess(_)) => "`gpucr ps` lists the programs under gpucr",
        Error::Tree(TreeError::NotYours(_)) => {
            "run gpucr as that user, or as root with all capabilities, which containers and services often lack"
        }
        Error::SharedOutside { .. } => {
            "dump all processes that share it together: --pid takes a process and all its descendants"
        }
        Error::Connected { .. } => {
            "with --tcp-close the restored program finds the connection closed; with --tcp-established it finds \
            it open, if the other end has kept it open until then"
        }
        Error::Unsupported { .. } => {
            "free these before the dump; gpucr-dump(1) lists what cannot be saved"
        }
        Error::Ungated { .. } => {
            "the program keeps running; a newer gpucr may know the function, and code that loads libcuda.so.1 by \
            that name gets gpucr's"
        }
        Error::Stalled { .. } => {
            "check the disk that the image was being written to, and try again"
        }
        _ => return None,
    };
    Some(text.into())
}

/// What to do about a host, or a user, that cannot do it.
fn about_host(error: &Error) -> Help {
    let text = match error {
        Error::NotRoot => "run it as root, for example with sudo",
        Error::Hook { .. } => "gpucr ran it with /bin/sh -c; its output is above",
        Error::StrangeDriver { .. } => {
            "gpucr loads only the driver library that this host's loader finds, and the software driver that \
             came with it; to use another one that you trust, set GPUCR_HOST_DRIVER=PATH in gpucr's environment"
        }
        Error::NoDriver(_) => {
            "on a host without a GPU use `gpucr run --device soft`; else install NVIDIA's driver \
             570 or newer"
        }
        Error::OtherDriver { .. } => "restore on a host with the driver that the image names",
        Error::NoDevice { .. } | Error::NoSuchDevice { .. } => {
            let command = restore("--device-map OLD=NEW");
            return Some(format!("name the device that is to take its place: {command}").into());
        }
        Error::DeviceTwice { .. } => {
            "map each device of the image to a different one: --device-map 0=1,1=0 swaps two"
        }
        Error::OtherDevice { .. } => "the driver moves programs only to a device of the same kind",
        _ => return None,
    };
    Some(text.into())
}

/// What to do where an image cannot be restored as things are.
fn about_restore(error: &Error) -> Help {
    let text = match error {
        Error::PidInUse { .. } => {
            let command = restore("--new-pids");
            return Some(
                format!(
                    "end the process that has it (the dumped program itself, if it was left running), or give the \
                     program a pid namespace of its own: {command}"
                )
                .into(),
            );
        }
        Error::FileChanged { .. } => {
            "put the file back as it was at the time of the dump. `--files keep` (the default) accepts logs of any \
             size; `--files rewind` restores other files that the program was writing"
        }
        Error::FileMissing { path } => {
            let file = shell_word(path);
            return Some(
                format!(
                    "put the file back as it was at the time of the dump; `--files rewind` does, where the image has all \
                     of it (a dump with a larger --save-files keeps it); for a log that was moved away an empty one \
                     will do: touch {file}"
                )
                .into(),
            );
        }
        Error::NoPipe { .. } => {
            "leave the option out: CRIU opens the same file or terminal again; only pipes, whose readers are \
            gone, need a file instead"
        }
        Error::RelayedToo => {
            "leave --stdout and --stderr out: output that the source no longer relays is kept in \
            /var/lib/gpucr/migrations"
        }
        Error::FileAltered { .. } => {
            "put the file back as it was at the time of the dump; a dump with a larger --save-files keeps a copy"
        }
        Error::NoRoom { .. } => {
            "free memory, or raise the memory limit of the control group that gpucr runs in"
        }
        Error::DeviceFull { .. } => {
            "free memory on that device, or name another one with --device-map"
        }
        Error::DamagedPart { .. } => DAMAGED,
        _ => return None,
    };
    Some(text.into())
}

/// What to do about warm images and those who hold them.
fn about_warm_image(error: &Error) -> Help {
    let text = match error {
        Error::NoMemory { asked: true, .. } => "give a higher --memory-limit",
        Error::NoMemory { asked: false, .. } => {
            "drop another image (`gpucr warm --list` shows them), or give a --memory-limit if you know that \
            there is room for it"
        }
        Error::BeingWarmed { .. } => {
            "wait for it; `gpucr warm --list` shows the image when it is warm"
        }
        Error::NotWarm { .. } => "`gpucr warm --list` shows what is kept",
        Error::Holder { pid, .. } => {
            let end = format!("end it, which frees its memory, and try again: kill {pid}");
            return Some(end.into());
        }
        Error::OtherHolder { .. } => {
            "run `gpucr warm --drop IMAGE` first; until then restores read the image from disk"
        }
        Error::StrangeHolder { .. } => {
            "it is not trusted: find out what that process is; restores read the image from disk"
        }
        _ => return None,
    };
    Some(text.into())
}

/// What to do about an agent that does not do what it is asked.
fn about_agent(error: &AgentError) -> Help {
    let text = match error {
        AgentError::Version { .. } => {
            "use the gpucr of the version that the program was started with"
        }
        AgentError::Broken { .. } => {
            "another gpucr may be at work on the program; try again when it has ended"
        }
        AgentError::Failed { code: code::OUT_OF_MEMORY, .. } => {
            "free memory of the device (nvidia-smi lists who uses it), or use a device with more"
        }
        AgentError::Failed { .. } => "a program with long-running kernels needs a longer --timeout",
        _ => return None,
    };
    Some(text.into())
}

/// What to do about CRIU.
fn about_criu(error: &CriuError) -> Help {
    match error {
        CriuError::Failed { hints, log, .. } => {
            let hints = hints.iter().map(|hint| about_hint(*hint));
            let log = log.as_ref().map(|log| format!("CRIU's whole log: {}", log.display()).into());
            let lines: Vec<_> = hints.chain(log).collect();
            (!lines.is_empty()).then(|| lines.join("\n").into())
        }
        CriuError::NotFound { .. } | CriuError::TooOld { .. } => Some(
            "install CRIU 4.1 or newer, 4.2 on Linux 6.16 or newer; `cargo xtask setup` in gpucr's source tree does it".into(),
        ),
        _ => None,
    }
}

/// What to do about a cause that CRIU's log names.
fn about_hint(hint: Hint) -> Cow<'static, str> {
    if let Some(option) = hint.option().filter(|_| hint != Hint::ExtUnixSk) {
        return format!("try again with {option} (see criu(8))").into();
    }
    let text = match hint {
        Hint::FileChanged => "put the file that CRIU names back as it was at the time of the dump",
        Hint::PidInUse => {
            let command = restore("--new-pids");
            return format!(
                "end whatever has the pid, which may also be a process group or session, or give the program a pid \
                 namespace of its own: {command}"
            )
            .into();
        }
        Hint::PortInUse => {
            let command = restore("--netns /run/netns/NAME");
            return format!(
                "end the process that has the port, or give the program a network of its own: {command}"
            )
            .into();
        }
        Hint::Permission => {
            "run gpucr as root with all capabilities, which containers and services often lack; for programs of other \
             users CRIU needs CAP_SYS_RESOURCE"
        }
        Hint::OtherMounts => OPENED_INSIDE,
        Hint::Device => {
            "the program has a device or something else open that CRIU cannot save: close it first"
        }
        Hint::IoUring => WITHOUT_IO_URING,
        Hint::NoTerminal => {
            return format!("the program had a terminal: {}", for_terminal()).into();
        }
        Hint::GhostLimit => "the program holds a large deleted file open: close it first",
        Hint::NoLoopback => {
            "bring up the loopback device of the network namespace: ip link set lo up"
        }
        Hint::SharedSegment => WITHOUT_SEGMENTS,
        Hint::ExtUnixSk => {
            "--ext-unix-sk makes CRIU save datagram sockets that are connected to processes outside, such as \
            those of syslog; a connection between Unix sockets has to be closed first (`gpucr dump --dry-run` names it)"
        }
        Hint::ControllingTerminal => WITHOUT_TERMINAL,
        Hint::NoSpace => "free space on the file system of the image",
        Hint::InFlight => "others keep connecting to a socket of the program; try again",
        _ => "see criu(8)",
    };
    text.into()
}

/// What to do about an image that is not to be trusted, and about keys.
fn about_trust(error: &TrustError) -> Help {
    let text = match error {
        TrustError::OtherImage { .. } => {
            "it is not the image that you meant, or it was changed: get it again from a source that you trust"
        }
        TrustError::Unsigned { .. } | TrustError::Untrusted { .. } => {
            "sign images when they are made (gpucr dump --sign KEY), and name the public key of the signer you trust"
        }
        TrustError::BadSignatures(_) => {
            "the file `signatures` next to its manifest was changed: get the image again"
        }
        TrustError::OpenKey { path } => {
            return Some(format!("chmod 600 {}", shell_word(path)).into());
        }
        TrustError::NoPublicKey { .. } | TrustError::NoPrivateKey { .. } => {
            "`gpucr key FILE` makes a pair of keys: FILE to sign with, FILE.pub to trust"
        }
        _ => return None,
    };
    Some(text.into())
}

/// What to do about gpucr's own libraries.
fn about_library(error: &LibraryError) -> Help {
    let text = match error {
        LibraryError::Misplaced { .. } => {
            "put the file back as the program had it; `gpucr run` does that, in the same version and as the user \
            who started the program"
        }
        LibraryError::NotPut { root, .. } if root.starts_with("/var/lib") => {
            "gpucr keeps the libraries of programs there, and only root may be able to write to it. A container that \
            is read-only needs a place for it: podman run --tmpfs /var/lib/gpucr:mode=755,exec (docker too)"
        }
        LibraryError::NotPut { .. } => {
            "name a directory that this user can write to, and from which libraries can be loaded: XDG_CACHE_HOME=DIR \
            (podman run -e XDG_CACHE_HOME=/tmp; docker too)"
        }
        LibraryError::Missing { .. } => "build or install gpucr as a whole, or set GPUCR_LIB_DIR",
        LibraryError::Io(_) => return None,
    };
    Some(text.into())
}

/// How to raise a limit of open files.
fn about_open_files(error: &TooFewDescriptors) -> String {
    let TooFewDescriptors { pid, own, blocks, .. } = error;
    // So many descriptors are enough for the blocks of memory, and for all else.
    let files = blocks.saturating_mul(2).saturating_add(4096);
    if *own {
        return format!("raise the limit: ulimit -n {files}");
    }
    format!(
        "raise the limit, of the program before it starts (ulimit -Hn {files}) or now: prlimit --pid {pid} \
         --nofile=:{files}"
    )
}

/// What to do about an image or a store.
fn about_image(error: &ImageError) -> Help {
    let text = match error {
        ImageError::Damaged { .. }
        | ImageError::Truncated { .. }
        | ImageError::MissingChunk { .. }
        | ImageError::Store(StoreError::DamagedChunk { .. }) => DAMAGED,
        ImageError::Output { path, reason } if *reason == NOT_EMPTY => {
            let word = shell_word(path);
            return Some(match Manifest::read(path) {
                Ok(_) => {
                    format!("give another name, or remove the image there: gpucr rm {word}").into()
                }
                Err(_) => "give another name, or empty that directory first".into(),
            });
        }
        ImageError::UnknownSection { .. } => "restore it with a newer gpucr",
        ImageError::ParentMissing { .. } => {
            "put the parent back: gpucr looks for it at the same place relative to the image as at the dump, \
            then at that path"
        }
        ImageError::ParentChanged { .. } => {
            "put the parent back; `gpucr inspect` prints the identity of an image"
        }
        ImageError::ParentInStore { .. } => {
            "dump into the store too, with --store: images in a store share data automatically"
        }
        ImageError::ChainTooLong { .. } => "make a full image: dump without --parent",
        ImageError::NoSpace { .. } => {
            "free space, and try again; in a store `gpucr gc` frees what no image needs"
        }
        ImageError::Store(StoreError::NoSpace { .. }) => {
            "nothing was lost; free some space and try again"
        }
        ImageError::Store(StoreError::NotAStoreDir { .. }) => {
            "give a new or empty directory, or one that `gpucr dump --store` has made"
        }
        ImageError::HasChildren { .. } => {
            "remove those first, or use --force if they are not needed any more"
        }
        ImageError::Store(StoreError::Busy { path }) if path.ends_with("gc.lock") => {
            "another gc is at work on the store; nothing is left to do for this one"
        }
        ImageError::Store(StoreError::Busy { .. }) => {
            "a dump, restore or gc uses the store; try again when it has ended (gc: --wait)"
        }
        _ => return None,
    };
    Some(text.into())
}

/// What to do about an image as one file.
fn about_tar(error: &TarError) -> Help {
    let text = match error {
        TarError::BadTar { .. } => {
            "make it again with `gpucr export`; a tar that was compressed must be unpacked first, \
             for example zstd -dc FILE | gpucr import - -o IMAGE"
        }
        TarError::Exists { .. } => "give another name, or remove it first",
        _ => return None,
    };
    Some(text.into())
}

/// What to do about memory that an image does not have.
fn about_extract(error: &ExtractError) -> Help {
    let text = match error {
        ExtractError::Nothing { of_driver: true, .. } => {
            "`gpucr inspect --all` lists the blocks of device memory; what the driver has saved (pools, arrays, \
            all memory of a program that was not started with `gpucr run`) is in the process's host memory in \
            the driver's own form"
        }
        ExtractError::Nothing { .. } | ExtractError::Kept { .. } => {
            "`gpucr inspect --all` lists the blocks of device memory"
        }
        ExtractError::NoProcess { .. } => "`gpucr inspect` shows the processes of an image",
        ExtractError::BadFile { .. } => {
            "`gpucr verify` tells whether the image is intact; a newer CRIU may list memory differently"
        }
        ExtractError::TooManyZeros { .. } | ExtractError::TooManyPlaces {} => {
            "give a smaller --length"
        }
        _ => return None,
    };
    Some(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_are_named_can_be_pasted() {
        assert_eq!(restore("--new-pids"), "gpucr restore --new-pids IMAGE", "it is not known");
        set_image(Path::new("/images/it's one"));
        assert_eq!(restore("--new-pids"), r"gpucr restore --new-pids '/images/it'\''s one'");
        let help = for_terminal();
        let (_, command) = help.split_once("script -qec ").unwrap();
        let (word, _) = command.split_once(" /dev/null").unwrap();
        let said = std::process::Command::new("bash")
            .args(["-c", &format!("printf %s {word}")])
            .output()
            .unwrap();
        let command = String::from_utf8_lossy(&said.stdout);
        assert_eq!(command, r"gpucr restore '/images/it'\''s one'");
    }

    #[test]
    fn what_is_for_the_whole_host_is_said_to_be() {
        let words = "to all programs of the host: sysctl kernel.io_uring_disabled=2";
        assert!(WITHOUT_IO_URING.contains(words));
    }
}

//! The recipes of `docs/recipes/` do what they say. Each runs in a pid namespace of its own, in which no other programs are.

use std::process::Command;

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, binary, finish, show};

/// What the scripts of the tests begin with.
const BEGIN: &str = r#"
    set -euo pipefail
    for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval "exec $fd>&-"; done
    exec < /dev/null
    steps() { grep -c '^step ' "$1" || true; }
    # Starts a program that ends by itself only after so many steps, and waits until it is at work.
    start() { gpucr run --device soft -- workload sgd --steps "$2" --step-delay-ms 10 > "$1" 2>&1 & until [ "$(steps "$1")" -gt 0 ]; do sleep 0.05; done; }
    more() { local had; had=$(steps "$1"); until [ "$(steps "$1")" -gt "$had" ]; do sleep 0.05; done; }
"#;

fn run(lab: &Lab, script: &str) -> Result<String> {
    let here = binary("gpucr").parent().map(|dir| dir.display().to_string()).unwrap_or_default();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]);
    command.args(["bash", "-c", &format!("{BEGIN}{script}")]).current_dir(lab.path("."));
    command.env("PATH", format!("{}:{here}:{path}", lab.path("bin").display()));
    command.env("RECIPES", concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/recipes"));
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_training_goes_on_after_gpucr_was_killed() -> Result<()> {
    let lab = Lab::new();
    run(
        &lab,
        r#"
        workload="workload sgd --steps 300 --step-delay-ms 10"
        gpucr run --device soft -- $workload > undisturbed
        export EVERY=1s GPUCR_OPTIONS="--device soft"
        "$RECIPES/training.sh" store $workload > log 2>&1 &
        until [ "$(gpucr ls store --format x 2>/dev/null | wc -l)" -gt 0 ]; do sleep 0.05; done
        kill -KILL $!
        wait $! || [ $? = 137 ]
        "$RECIPES/training.sh" store $workload >> log 2>&1
        cat log
        [ "$(grep -c '^ready pid=' log)" = 1 ]
        [ "$(grep '^result ' log)" = "$(grep '^result ' undisturbed)" ]"#,
    )?;
    Ok(())
}

#[test]
fn a_server_is_up_when_it_answers_and_gone_when_it_does_not() -> Result<()> {
    let lab = Lab::new();
    let said = run(
        &lab,
        r#"
        start log 100000
        gpucr dump --pid $! -o image
        had=$(steps log)
        pid=$("$RECIPES/server.sh" image sh -c "[ \$(grep -c '^step ' log) -gt $had ]")
        kill -0 "$pid"
        more log
        # Twice at once, from the same memory.
        second=$("$RECIPES/server.sh" image true)
        [ "$second" != "$pid" ] && kill -0 "$pid" "$second"
        gpucr warm --list
        status=0
        LIMIT=2 "$RECIPES/server.sh" image false > none 2> why || status=$?
        [ $status = 1 ] && [ ! -s none ] && grep -q 'does not answer' why
        kill -KILL "$pid" "$second"
        gpucr warm --drop image"#,
    )?;
    ensure!(said.lines().any(|line| line.trim_end().ends_with("/image")), "it was warm: {said}");
    Ok(())
}

/// With restic, or else with something that only looks like it.
#[test]
fn a_backup_of_a_store_is_whole() -> Result<()> {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("bin"))?;
    run(
        &lab,
        r#"
        if ! command -v restic > /dev/null; then
            cat > bin/restic <<'END'
#!/bin/bash
case $1 in
    init) mkdir "$RESTIC_REPOSITORY" ;;
    backup) tar -cf "$RESTIC_REPOSITORY/tar" "$(realpath "${@: -1}")" 2> /dev/null ;;
    restore) tar -xf "$RESTIC_REPOSITORY/tar" -C "${@: -1}" ;;
esac
END
            chmod +x bin/restic
        fi
        export RESTIC_REPOSITORY=$PWD/repository RESTIC_PASSWORD=secret RESTIC_CACHE_DIR=$PWD/cache TMPDIR=$PWD
        restic init > /dev/null
        start log 100000
        gpucr dump --pid $! -R --store store --name one
        gpucr dump --pid $! --store store --name two
        "$RECIPES/backup.sh" store > said
        cat said
        [ "$(grep -c 'is intact' said)" = 2 ]
        # What is damaged is not kept quiet.
        for pack in store/packs/*; do truncate -s 100 "$pack"; done
        ! "$RECIPES/backup.sh" store > said 2>&1
        ! ls -d gpucr-backup.*"#,
    )?;
    Ok(())
}

#[test]
fn a_host_is_emptied_and_filled_again() -> Result<()> {
    let lab = Lab::new();
    run(
        &lab,
        r#"
        start one 100000; first=$!
        start two 100000; second=$!
        "$RECIPES/maintenance.sh" save store
        for pid in $first $second; do wait $pid || [ $? = 137 ]; done
        [ "$(gpucr ls store --format x | wc -l)" = 2 ]
        pids=$("$RECIPES/maintenance.sh" restore store | grep -x '[0-9]*')
        more one; more two
        [ "$(gpucr ls store --format x | wc -l)" = 0 ]
        # Nothing is left to be brought back.
        "$RECIPES/maintenance.sh" restore store
        kill -KILL $pids"#,
    )?;
    Ok(())
}

//! `--format`: a few words of the templates that docker and podman know, filled from what `--json` prints.
//!
//! `{{.name}}` is a field, `{{.devices.0.uuid}}` one further down (elements of lists by their number), `{{.}}` the whole,
//! `{{json .name}}` the same as JSON, and `{{range .list}}…{{end}}` is repeated for each element of a list, which is `.`
//! there. `\n` and `\t` are a line end and a tab.

use serde_json::Value;

use crate::commands::Outcome;
use crate::escape::{escaped, escaped_json};
use crate::failure::{CliError, FAILED, USAGE};
use crate::say;

/// What is between `{{` and `}}`, and what is not.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Field { path: Vec<String>, as_json: bool },
    Range { path: Vec<String>, body: Vec<Part> },
}

/// A template that is known to be sound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template(Vec<Part>);

/// Reads a template, for clap.
///
/// # Errors
/// It has an unknown word, or braces or a `range` without an end.
pub(crate) fn template(text: &str) -> Result<Template, String> {
    if text == "json" {
        return Ok(Template(vec![Part::Field { path: Vec::new(), as_json: true }]));
    }
    let text = text.replace("\\n", "\n").replace("\\t", "\t");
    // The parts of each range that is open, the outermost first, and what it goes through.
    let mut open: Vec<(Vec<String>, Vec<Part>)> = vec![(Vec::new(), Vec::new())];
    let mut rest = &*text;
    while !rest.is_empty() {
        let (before, after) = rest.split_once("{{").map_or((rest, None), |(b, a)| (b, Some(a)));
        let mut part = (!before.is_empty()).then(|| Part::Text(before.to_owned()));
        rest = "";
        if let Some(after) = after {
            let (word, left) = after.split_once("}}").ok_or("`{{` has no `}}`")?;
            rest = left;
            if let Some((_, parts)) = open.last_mut() {
                parts.extend(part.take());
            }
            part = match word.split_whitespace().collect::<Vec<_>>()[..] {
                ["end"] if open.len() > 1 => {
                    open.pop().map(|(path, body)| Part::Range { path, body })
                }
                ["range", field] => {
                    open.push((path(field)?, Vec::new()));
                    None
                }
                ["json", field] => Some(Part::Field { path: path(field)?, as_json: true }),
                [field] => Some(Part::Field { path: path(field)?, as_json: false }),
                _ => return Err(unknown(word)),
            };
        }
        if let Some((_, parts)) = open.last_mut() {
            parts.extend(part);
        }
    }
    match (open.pop(), open.is_empty()) {
        (Some((_, parts)), true) => Ok(Template(parts)),
        _ => Err("`{{range …}}` has no `{{end}}`".into()),
    }
}

/// The names in `.a.b`; none in `.`.
fn path(field: &str) -> Result<Vec<String>, String> {
    let names = field.strip_prefix('.').ok_or_else(|| unknown(field))?;
    let names = if names.is_empty() { Vec::new() } else { names.split('.').collect() };
    if names.iter().any(|name| name.is_empty()) {
        return Err(unknown(field));
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

fn unknown(word: &str) -> String {
    format!(
        "`{{{{{word}}}}}` is not understood: {{{{.name}}}}, {{{{json .name}}}} and {{{{range .list}}}}…{{{{end}}}} are"
    )
}

/// Prints a value as a template says; a list element by element, each on a line.
///
/// # Errors
/// It has no such field.
pub(crate) fn print(template: &Template, value: &impl serde::Serialize) -> Outcome {
    let failed = |error| CliError::new(FAILED, format!("cannot make JSON: {error}"));
    let lines = match serde_json::to_value(value).map_err(failed)? {
        Value::Array(rows) => rows,
        value => vec![value],
    };
    for line in &lines {
        let mut out = String::new();
        fill(&template.0, line, &mut out).map_err(|what| CliError::new(USAGE, what))?;
        // Some end with a line end of their own, as behind the last element of a list.
        say::text(out.strip_suffix('\n').unwrap_or(&out));
    }
    Ok(std::process::ExitCode::SUCCESS)
}

fn fill(parts: &[Part], value: &Value, out: &mut String) -> Result<(), String> {
    for part in parts {
        match part {
            Part::Text(text) => *out += text,
            Part::Field { path, as_json } => *out += &shown(find(path, value)?, *as_json),
            Part::Range { path, body } => match find(path, value)? {
                Value::Array(list) => list.iter().try_for_each(|one| fill(body, one, out))?,
                _ => return Err(format!("`.{}` is not a list", path.join("."))),
            },
        }
    }
    Ok(())
}

fn find<'a>(path: &[String], value: &'a Value) -> Result<&'a Value, String> {
    path.iter().enumerate().try_fold(value, |value, (number, name)| {
        let (found, known) = match value {
            Value::Object(fields) => (fields.get(name), fields.keys().cloned().collect()),
            Value::Array(list) => {
                let at = name.parse().ok().and_then(|at: usize| list.get(at));
                (at, vec![format!("{} elements, by their numbers from 0", list.len())])
            }
            _ => (None, vec!["a value".to_owned()]),
        };
        found.ok_or_else(|| {
            let within = match &path[..number] {
                [] => String::new(),
                names => format!(" in `.{}`", names.join(".")),
            };
            format!("there is no `{name}`{within}, only {}", known.join(", "))
        })
    })
}

/// A value as text: words without quotation marks. What is in it comes from images and programs.
fn shown(value: &Value, as_json: bool) -> String {
    match value {
        Value::String(text) if !as_json => escaped(text).into_owned(),
        Value::Null if !as_json => String::new(),
        other => escaped_json(&other.to_string()).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn filled(text: &str) -> Result<String, String> {
        let value = json!({"pid": 7, "name": "a\u{1b}b", "none": null,
            "list": [{"x": 1, "y": ["p", "q"]}, {"x": 2, "y": []}]});
        let mut out = String::new();
        fill(&template(text)?.0, &value, &mut out)?;
        Ok(out)
    }

    #[test]
    fn fields_are_filled_in() {
        let cases = [
            ("", ""),
            ("plain }} text", "plain }} text"),
            ("{{.pid}} {{ .name }}|{{.none}}|", "7 a\\u{1b}b||"),
            ("{{json .name}}{{json .list.1}}", r#""a\u001bb"{"x":2,"y":[]}"#),
            ("{{range .list}}{{.x}}:{{range .y}}{{.}},{{end}}\\n{{end}}\\t.", "1:p,q,\n2:\n\t."),
            ("{{.list.0.y.1}}", "q"),
        ];
        for (text, wanted) in cases {
            assert_eq!(filled(text).as_deref(), Ok(wanted), "{text}");
        }
        assert!(filled("json").unwrap().starts_with("{\"list\""));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            ("{{.pid", "no `}}`"),
            ("{{range .list}}", "no `{{end}}`"),
            ("{{end}}", "not understood"),
            ("{{pid}}", "not understood"),
            ("{{if .pid}}", "not understood"),
            ("{{.a..b}}", "not understood"),
            ("{{.nothing}}", "only list, name, none, pid"),
            ("{{.list.2}}", "2 elements"),
            ("{{.pid.x}}", "no `x` in `.pid`, only a value"),
            ("{{range .pid}}{{end}}", "not a list"),
        ];
        for (text, wanted) in cases {
            let error = filled(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}

"""`kvrelay key`."""

import click


@click.command()
@click.argument("name", metavar="WHOSE")
@click.option("--admin", is_flag=True, help="It may also make admin calls.")
def key(name: str, admin: bool) -> None:
    """Make an API key and its lines of API_KEYS_FILE.

    \b
    Example:
      kvrelay key team-a >> keys.toml
    """
    from app.gateway.keys import check_name, new_key, stanza

    try:
        check_name(name)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="WHOSE") from None
    secret = new_key()
    click.echo(f"{secret}\n", err=True)  # apart from the stanza, which `>> keys.toml` takes
    click.echo(stanza(name, secret, admin), nl=False)

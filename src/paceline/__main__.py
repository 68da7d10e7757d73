from paceline.cli.main import main

main()
